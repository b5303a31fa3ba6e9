"""The target's distribution in a few hundred bytes a position, and what each loss can have of it.

The last hidden state of a large target is 8 kB or more a position; this form does not grow with the
target. It keeps two things, because no single one serves every loss:

- the k most probable tokens with their exact log-probabilities, of the full softmax. The overlap
  sum_K min(p, q) of these is a lower bound, and the rest is bracketed position by position:

      sum_K min(p, q)  <=  overlap  <=  sum_K min(p, q) + min(1 - p(K), 1 - q(K))

- N tokens drawn from p. Their frequencies have expectation p, so a loss that is linear in p (the
  cross-entropy, and with it the forward KL) has an unbiased value and gradient, which truncated
  log-probabilities cannot give. Source: sparse logit sampling (RS-KD), arXiv:2503.16870.

The overlap is concave in p, so draws would bias it downwards; the KL is not determined by a top-k,
so that would bias it. Which loss takes what, and which are refused: signal_forms.py.

Shapes: N positions, c positions of a chunk, n draft vocabulary, k kept tokens, m draws, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from distill.comparison import precise
from distill.draft_vocab import DraftVocab
from distill.signals import TargetHead
from specdec_runtime.model import CausalModel
from specdec_runtime.noise import UniformStreams, draw_by_inversion

_DRAW_STREAM = 4  # purpose of the noise; drafting, verification and writing own 1 to 3
_CHUNK = 128  # positions whose full logits, probabilities and sums are held at once
_LOG_ZERO = -1e4  # below the log of every number: zero times it is no NaN
_SMALL_VOCAB = 1 << 16  # ids of a vocabulary up to this fit into 16 bits


@dataclass
class SparseRows:
    """The target's signal at N positions.

    Attributes:
        top_ids: [N, k] target ids in descending order of probability; 16 or 32 bits.
        top_log_probs: [N, k] of the full softmax over the real vocabulary; 16 or 32 bits.
        draws: [N, m] target ids drawn from it; 16 or 32 bits.
        entropy: [N] float32, in nats.
        log_sum_exp: [N] float32, of the logits.
        argmax: [N] int64 target ids: what greedy decoding says next.
    """

    top_ids: Tensor
    top_log_probs: Tensor
    draws: Tensor
    entropy: Tensor
    log_sum_exp: Tensor
    argmax: Tensor

    is_truncated: ClassVar[bool] = True

    def __len__(self) -> int:
        return len(self.argmax)

    def __getitem__(self, part: slice) -> "SparseRows":
        return SparseRows(*(tensor[part] for tensor in self._tensors()))

    def to(self, device: torch.device | str) -> "SparseRows":
        return SparseRows(*(tensor.to(device) for tensor in self._tensors()))

    @classmethod
    def join(cls, rows: Sequence["SparseRows"]) -> "SparseRows":
        return cls(*(torch.cat(parts) for parts in zip(*(r._tensors() for r in rows), strict=True)))

    def comparison(
        self, draft_logits: Tensor, head: TargetHead, part: slice, *, temperature: float = 1.0
    ) -> "SparseComparison":
        assert temperature == 1.0, "probabilities at another temperature need the full vocabulary"
        return SparseComparison(draft_logits, self[part], head.vocab)

    def _tensors(self) -> Iterator[Tensor]:
        yield from (self.top_ids, self.top_log_probs, self.draws)
        yield from (self.entropy, self.log_sum_exp, self.argmax)


class SparseComparison:
    """What a draft model predicts next to what is kept of the target's distribution.

    The counterpart of `comparison.Comparison`, with the same names. `kl` is an unbiased estimate
    (with a reduced vocabulary up to a constant of the target, which has no gradient), `overlap` the
    lower end of its bracket and `slack` the width of it.

    Args:
        draft_logits: [c, n], any float type.
        rows: of the same c positions.
    """

    def __init__(self, draft_logits: Tensor, rows: SparseRows, vocab: DraftVocab) -> None:
        self.draft_logits = precise(draft_logits)
        self._rows, self._vocab = rows, vocab

    @property
    def kl(self) -> Tensor:
        assert self._rows.draws.shape[1] > 0, "require_form lets no such loss through"
        return self._measures[0]

    @property
    def overlap(self) -> Tensor:
        return self._measures[1]

    @cached_property
    def mass(self) -> Tensor:
        """[c] target probability of the kept tokens that the draft can say."""
        return self._top_probs.sum(-1)

    @property
    def slack(self) -> Tensor:
        """[c] how much more the overlap may be."""
        unseen = 1 - self._rows.top_log_probs.float().exp().sum(-1)
        return torch.minimum(unseen, self._measures[2].detach()).clamp_min(0.0)

    @cached_property
    def _measures(self) -> tuple[Tensor, Tensor, Tensor]:
        cross_entropy, overlap, beyond = _DrawsAndTop.apply(
            self.draft_logits,
            self._vocab.to_draft(self._rows.draws.long()),
            self._top_ids,
            self._top_probs,
        )
        return cross_entropy - self._rows.entropy, overlap, beyond

    @cached_property
    def _top_ids(self) -> Tensor:
        return self._vocab.to_draft(self._rows.top_ids.long())

    @cached_property
    def _top_probs(self) -> Tensor:
        probs = precise(self._rows.top_log_probs).exp()
        return torch.where(self._top_ids >= 0, probs, 0.0).to(self.draft_logits.dtype)


class _DrawsAndTop(torch.autograd.Function):
    """(logits, draws [c, m], top ids [c, k], top probs [c, k]) -> (cross-entropy of the draws,
    sum_K min(p, q), 1 - q(K)), each [c]; ids are draft ids, -1 outside. Only the first two carry a
    gradient:

        cross-entropy   f q - frequencies        (f = the share of the draws that the draft can say)
        overlap         q (I - sum_K q I)        (I = 1 at kept tokens with q < p)

    The [c, n] numbers are passed over twice, whatever k and m are.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, draws: Tensor, top_ids: Tensor, top_probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_q = logits.log_softmax(-1)
        said = (draws >= 0).to(log_q.dtype)
        weight = said / max(draws.shape[1], 1)
        cross_entropy = -(log_q.gather(1, draws.clamp_min(0)) * weight).sum(-1)
        known = (top_ids >= 0).to(log_q.dtype)
        top_q = log_q.gather(1, top_ids.clamp_min(0)).exp() * known
        ctx.save_for_backward(log_q.exp_(), draws, weight, top_ids, top_q, top_probs)
        ctx.set_materialize_grads(False)
        beyond = 1 - top_q.sum(-1)
        ctx.mark_non_differentiable(beyond)
        return cross_entropy, torch.minimum(top_probs, top_q).sum(-1), beyond

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        q, draws, weight, top_ids, top_q, top_probs = ctx.saved_tensors
        entropy_scale, overlap_scale = outputs[:2]
        scale = q.new_zeros(len(q))
        places, values = [], []
        if entropy_scale is not None:
            scale = scale + entropy_scale * weight.sum(-1)
            places.append(draws)
            values.append(-entropy_scale[:, None] * weight)
        if overlap_scale is not None:
            below = torch.where(top_q < top_probs, top_q, 0.0)
            scale = scale - overlap_scale * below.sum(-1)
            places.append(top_ids)
            values.append(overlap_scale[:, None] * below)
        gradient = q * scale[:, None]
        for ids, value in zip(places, values, strict=True):
            gradient.scatter_add_(1, ids.clamp_min(0), value)  # zero where the id is outside
        return gradient, None, None, None


def sparse_rows(
    model: CausalModel,
    hidden: Tensor,
    *,
    real_vocab_size: int,
    top_k: int,
    num_draws: int,
    seeds: Sequence[int],
    dtype: torch.dtype,
) -> SparseRows:
    """The sparse signal of a target's post-norm states; every sum in float32 or more.

    Args:
        hidden: [N, D].
        seeds: of the N positions' noise.
        dtype: of the stored log-probabilities.
    """
    noise = UniformStreams(seeds, purpose=_DRAW_STREAM).take(range(len(seeds)), num_draws)
    parts = []
    for states, uniforms in zip(hidden.split(_CHUNK), noise.split(_CHUNK), strict=True):
        logits = model.logits_of(states)[:, :real_vocab_size].float()
        sums = logits.logsumexp(-1)
        log_probs = logits - sums[:, None]
        top = log_probs.topk(min(top_k, real_vocab_size), -1)
        probs = log_probs.exp()
        draws = draw_by_inversion(probs, uniforms.to(probs.device))
        parts.append(
            SparseRows(
                top_ids=narrowed(top.indices, real_vocab_size),
                top_log_probs=top.values.to(dtype),
                draws=narrowed(draws, real_vocab_size),
                entropy=-torch.linalg.vecdot(probs, log_probs.clamp_min(_LOG_ZERO)),
                log_sum_exp=sums,
                argmax=logits.argmax(-1),
            )
        )
    return SparseRows.join(parts)


def narrowed(ids: Tensor, vocab_size: int) -> Tensor:
    """Ids in the fewest bits that hold all of the vocabulary."""
    return ids.to(torch.uint16 if vocab_size <= _SMALL_VOCAB else torch.int32)
