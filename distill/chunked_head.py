"""The draft head and the loss, a chunk of tokens at a time.

The logits of a batch are its largest tensor by far: 2,048 positions of a 150k vocabulary take
1.2 GB, several times over inside a loss. Here the gradient of the head's input is computed together
with the loss, chunk by chunk, so that only one chunk of logits ever exists; small chunks also stay
in the CPU's cache, where elementwise work on them costs next to nothing. Value and gradient are
those of the unchunked loss. The idea of gradients within the forward pass: Liger kernels,
arXiv:2410.10989, section 3.

Shapes: N loss positions, D hidden size, n draft vocabulary, P parts of the loss.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.losses import (
    LOSSES,
    TARGET_FREE,
    LossConfig,
    LossName,
    greedy_agreement,
    hard_labels,
    lk_mix,
)
from distill.position_weights import WeightScheme
from distill.signals import Compared, SignalRows, StateRows, TargetHead
from distill.weighing import PerPosition, Weigh, Weighed

# Of one chunk; a loss with its gradient holds some six tensors of this size at once. Enough positions
# for products at full rate up to vocabularies of 256k.
MAX_LOGITS_BYTES = 64 * 2**20


class HeadSums(NamedTuple):
    """Sums over the positions of a batch; only the loss carries a gradient."""

    loss: Tensor  # scalar
    agreement: Tensor  # scalar: positions where both say the same token first
    overlap: Tensor  # scalar: sum of min(target, draft), or of what is known of it
    overlap_slack: Tensor | None  # scalar: how much more it may be; None if it is exact
    kept_mass: Tensor  # scalar: target probability that was compared with the draft's
    num_compared: Tensor  # scalar: positions behind the three sums above


class _Chunk(NamedTuple):
    parts: Tensor  # [P, c] the parts of the loss
    counts: Tensor  # [6, c] agreement, overlap, its slack, kept mass, compared, q(label)


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    target: TargetHead,
    rows: SignalRows,
    labels: Tensor,
    config: LossConfig,
    *,
    weigh: Weigh | None = None,
) -> HeadSums:
    """The summed loss of N positions; see `HeadPass`.

    Args:
        weigh: how much each position counts, from what was found there; None = all alike.
    """
    one = HeadPass(hidden, weight, target, rows, labels, config)
    return one.sums(None if weigh is None else weigh(one.found))


class HeadPass:
    """A head over N positions: what is found there first, then the loss, weighed by it if need be.

    The loss is differentiable in `hidden` and, if it is trained, `weight`. A frozen head makes one
    pass for both; a trained one, whose gradient is summed over positions while it is computed, makes
    another where weights have to come first.

    Args:
        hidden: [N, D] what the draft model's head reads.
        weight: [n, D] the draft model's head.
        target: the target's head over the same draft vocabulary.
        rows: the target's signal at the same positions.
        labels: [N] int64 target ids of the tokens that follow in the text.
        config: which loss; `chunk_tokens` bounds the memory.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: TargetHead,
        rows: SignalRows,
        labels: Tensor,
        config: LossConfig,
    ) -> None:
        self._hidden, self._weight, self._rows, self._config = hidden, weight, rows, config
        self._slices = _slices(len(hidden), len(weight), config)
        # The weights of this loss follow from the whole batch: its two parts are kept apart until then.
        is_split = config.name is LossName.lk_hybrid and len(self._slices) > 1
        self._run = _ChunkLoss(target, rows, labels, config, is_split=is_split)
        self._train_head = torch.is_grad_enabled() and weight.requires_grad

    @cached_property
    def found(self) -> PerPosition:
        """What weights are made of."""
        if not self._train_head:
            counts = self._passed[1]
        else:
            with torch.no_grad():
                _, counts = self._pass(wants_gradient=False)
        return PerPosition(agrees=counts[0] > 0, overlap=counts[1], token_probs=counts[5])

    def sums(self, weighed: Weighed | None = None) -> HeadSums:
        """The loss and the counts; None weighs all positions alike."""
        if weighed is not None and self._train_head:
            self._run.row_weights = weighed.weights
        parts, counts = self._passed
        if weighed is not None and not self._train_head:
            parts = parts * weighed.weights
        agreement, accepted, slack, kept_mass, num_compared, _ = counts.sum(1)
        loss = _combined(parts.sum(1), accepted / num_compared, self._config)
        if weighed is not None and weighed.value is not None:
            loss = loss + (weighed.value - loss).detach()  # this value, with the sum's gradient
        known = slack if self._rows.is_truncated else None
        return HeadSums(loss, agreement, accepted, known, kept_mass, num_compared)

    @cached_property
    def _passed(self) -> tuple[Tensor, Tensor]:
        trained = self._hidden.requires_grad or self._weight.requires_grad
        return self._pass(wants_gradient=torch.is_grad_enabled() and trained)

    def _pass(self, *, wants_gradient: bool) -> tuple[Tensor, Tensor]:
        """(parts [P, N] with gradient, counts [6, N])"""
        arguments = (self._hidden, self._weight, self._run, self._slices, wants_gradient)
        return _GradientInForward.apply(*arguments)


@torch.no_grad()
def position_overlaps(
    hidden: Tensor, weight: Tensor, target: TargetHead, rows: SignalRows, config: LossConfig
) -> Tensor:
    """[N] sum of min(target, draft) at each position; arguments as in `head_loss`."""
    unused = torch.zeros(len(rows), dtype=torch.int64, device=hidden.device)  # labels
    run = _ChunkLoss(target, rows, unused, config, is_split=False)
    slices = _slices(len(hidden), len(weight), config)
    return _GradientInForward.apply(hidden, weight, run, slices, False)[1][1]


def _slices(num_positions: int, vocab_size: int, config: LossConfig) -> list[slice]:
    size = max(1, min(config.chunk_tokens, MAX_LOGITS_BYTES // (4 * vocab_size)))
    return [slice(i, i + size) for i in range(0, num_positions, size)]


class _ChunkLoss:
    """The loss and the counts of one chunk of draft logits.

    `row_weights` [N], once known, multiply the loss.
    """

    def __init__(
        self,
        target: TargetHead,
        rows: SignalRows,
        labels: Tensor,
        config: LossConfig,
        *,
        is_split: bool,
    ) -> None:
        self.target, self.rows, self.config, self.is_split = target, rows, config, is_split
        self.labels = target.vocab.to_draft(labels)
        states_only = isinstance(rows, StateRows)
        self.argmax = None if states_only else target.vocab.to_draft(rows.argmax)
        self.row_weights: Tensor | None = None

    def __call__(self, logits: Tensor, part: slice) -> _Chunk:
        temperature = self.config.softmax_temperature
        logits = logits if temperature == 1.0 else logits / temperature
        counts = torch.zeros(6, len(logits), device=logits.device)
        if self.argmax is not None:
            counts[0] = greedy_agreement(logits.detach(), self.argmax[part])
        if self.config.weights.scheme is WeightScheme.d_pace:
            known = self.labels[part] >= 0  # a token outside is drafted with probability 0
            counts[5] = (-hard_labels(logits.detach(), self.labels[part])).exp() * known
        if self.config.name in TARGET_FREE and part.start > 0:
            # One chunk tells the overlap; the baseline does not pay for the target's head again.
            return self._weighed(hard_labels(logits, self.labels[part])[None], counts, part)
        compared = self.rows.comparison(logits, self.target, part, temperature=temperature)
        counts[1] = compared.overlap.detach()
        counts[2], counts[3] = compared.slack, compared.mass
        if self.argmax is None:
            counts[0] = greedy_agreement(logits.detach(), compared.target_log_probs.argmax(-1))
        counts[4].fill_(1.0)
        return self._weighed(self._parts(compared, self.labels[part]), counts, part)

    def _parts(self, compared: Compared, labels: Tensor) -> Tensor:
        """[P, c] what `_combined` makes the loss of."""
        if self.is_split:
            return torch.stack([compared.kl, 1 - compared.overlap])
        return LOSSES[self.config.name](compared, labels, self.config)[None]

    def _weighed(self, parts: Tensor, counts: Tensor, part: slice) -> _Chunk:
        if self.row_weights is not None:
            parts = parts * self.row_weights[part]
        return _Chunk(parts, counts)


def _combined(parts: Tensor, mean_overlap: Tensor, config: LossConfig) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return lk_mix(parts[0], parts[1], mean_overlap, config.eta)


class _GradientInForward(torch.autograd.Function):
    """(hidden, weight) -> (parts [P, N], counts [6, N]); gradients are kept instead of logits.

    Each position's gradient in `hidden` is kept apart, so that positions may be weighted afterwards;
    that in `weight` is a sum over positions, so where it is trained all have to weigh the same here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        run: Callable[[Tensor, slice], _Chunk],
        slices: list[slice],
        wants_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        train_head = wants_gradient and weight.requires_grad
        head = weight.detach().requires_grad_(train_head)
        chunks: list[_Chunk] = []
        hidden_grads: list[Tensor] = []  # each [P, c, D]
        head_grad: Tensor | None = None  # [P, n, D]
        for part in slices:
            states = hidden[part].detach().requires_grad_(wants_gradient)
            with torch.set_grad_enabled(wants_gradient):
                chunk = run(F.linear(states, head), part)
                inputs = [states, head] if train_head else [states]
                sums = chunk.parts.sum(1)
                grads = _gradients_of_each(sums, inputs) if wants_gradient else []
            chunks.append(_Chunk(chunk.parts.detach(), chunk.counts))
            hidden_grads += grads[:1]
            for grad in grads[1:]:
                head_grad = grad if head_grad is None else head_grad.add_(grad)
        ctx.hidden_grad = torch.cat(hidden_grads, 1) if hidden_grads else None
        ctx.head_grad = head_grad
        counts = torch.cat([chunk.counts for chunk in chunks], 1)
        ctx.mark_non_differentiable(counts)
        return torch.cat([chunk.parts for chunk in chunks], 1), counts

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale = outputs[0]  # [P, N]
        hidden = head = None
        if ctx.hidden_grad is not None:
            hidden = torch.einsum("pi,pij->ij", scale.to(ctx.hidden_grad.dtype), ctx.hidden_grad)
        if ctx.head_grad is not None:
            of_part = scale[:, 0].to(ctx.head_grad.dtype)
            head = torch.einsum("p,pij->ij", of_part, ctx.head_grad)
        return hidden, head, None, None, None


def _gradients_of_each(sums: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """For each input, the gradients of all sums stacked in front: [P, *input.shape]."""
    last = len(sums) - 1
    grads = [
        torch.autograd.grad(part, inputs, retain_graph=index < last)
        for index, part in enumerate(sums)
    ]
    return [torch.stack(of_input) for of_input in zip(*grads, strict=True)]
