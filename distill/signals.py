"""What the target says at each loss position.

The form that every loss can use exactly is the target's last hidden state (post-norm, what its head reads): D numbers a position
instead of V probabilities, and the frozen head turns them back into logits of exactly the tokens
that are asked for. The full vocabulary is only ever needed for two numbers, the log-sum-exp of the
logits and their argmax, and those are kept from the moment when the target's logits existed anyway.

- cached: `answers` recorded the three while the target wrote the text, or `cache` computed them
  afterwards (`TargetRows` of a batch);
- live: `live_rows` runs the target on the batch now.

A smaller form that some losses can use is in sparse_signals.py, which one a run uses in
signal_forms.py. `SignalRows` is what all of them offer to a loss.

Shapes: N loss positions, c of a chunk, D hidden size, V target vocabulary, n draft vocabulary,
B rows, S tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.comparison import Comparison
from distill.draft_vocab import DraftVocab
from specdec_runtime.model import CausalModel

# Stored states are rounded to 16 bits; recomputed log-sum-exps of a right head stay far below this.
_LSE_TOLERANCE = 0.1
_LIVE_CHUNK = 256  # positions whose full logits are held at once
# What some families do behind the head, and the value that does nothing (hf_model.py applies them).
_LOGIT_CHANGES = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
_NO_SIGNAL = (
    "these answers have no target signal: compute it with `python -m distill.cache`, or train with "
    "signals.form=live"
)


Rows = TypeVar("Rows")  # one of the dataclasses of a signal's form


class Compared(Protocol):
    """Draft and target at c positions, as the losses see them; everything [c] unless stated."""

    draft_logits: Tensor  # [c, n], with target_log_probs beside them where is_truncated is False

    @property
    def kl(self) -> Tensor: ...

    @property
    def overlap(self) -> Tensor: ...

    @property
    def mass(self) -> Tensor:
        """Target probability that was compared: inside the draft vocabulary, and known."""

    @property
    def slack(self) -> Tensor:
        """How much more the overlap may be than what is known of it; without gradient."""


class SignalRows(Protocol):
    """The target's signal at N positions, in some form."""

    is_truncated: ClassVar[bool]  # whether the overlap is known up to a bracket only

    @property
    def argmax(self) -> Tensor:
        """[N] int64 target ids."""

    def __len__(self) -> int: ...

    def to(self, device: torch.device | str) -> Self: ...

    @classmethod
    def join(cls, rows: Sequence[Any]) -> Self:
        """The positions of several, one behind the other; all of one form."""

    def comparison(
        self, draft_logits: Tensor, head: "TargetHead", part: slice, *, temperature: float = 1.0
    ) -> Any:
        """The chunk `part` next to what the draft says there [c, n]: a `Compared`."""


@dataclass
class NoSignal:
    """N positions of which only the text is known (yet)."""

    num_positions: int

    is_truncated: ClassVar[bool] = False

    @property
    def argmax(self) -> Tensor:
        raise ValueError(_NO_SIGNAL)

    def __len__(self) -> int:
        return self.num_positions

    def to(self, device: torch.device | str) -> "NoSignal":
        return self

    @classmethod
    def join(cls, rows: Sequence["NoSignal"]) -> "NoSignal":
        return cls(sum(map(len, rows)))

    def comparison(
        self, draft_logits: Tensor, head: "TargetHead", part: slice, *, temperature: float = 1.0
    ) -> Compared:
        raise ValueError(_NO_SIGNAL)


@dataclass
class TargetRows:
    """The target's signal at N positions.

    Attributes:
        hidden: [N, D] post-norm hidden state, 16 or 32 bits.
        log_sum_exp: [N] float32, of the logits over the real vocabulary at temperature 1.
        argmax: [N] int64 target ids: what greedy decoding says next.
    """

    hidden: Tensor
    log_sum_exp: Tensor
    argmax: Tensor

    is_truncated: ClassVar[bool] = False

    def __len__(self) -> int:
        return len(self.hidden)

    def to(self, device: torch.device | str) -> "TargetRows":
        return TargetRows(
            self.hidden.to(device), self.log_sum_exp.to(device), self.argmax.to(device)
        )

    @classmethod
    def join(cls, rows: Sequence["TargetRows"]) -> "TargetRows":
        return cls(
            torch.cat([row.hidden for row in rows]),
            torch.cat([row.log_sum_exp for row in rows]),
            torch.cat([row.argmax for row in rows]),
        )

    def comparison(
        self, draft_logits: Tensor, head: "TargetHead", part: slice, *, temperature: float = 1.0
    ) -> Comparison:
        return Comparison(draft_logits, head.log_probs(self, part, temperature=temperature))


@dataclass
class StateRows:
    """The target's states at N positions and nothing else, for a head over the whole vocabulary: what
    `TargetRows` keeps beside them follows from the logits that a loss makes of them anyway.

    Attributes:
        hidden: [N, D] as in `TargetRows`.
    """

    hidden: Tensor

    is_truncated: ClassVar[bool] = False

    @property
    def argmax(self) -> Tensor:
        raise ValueError("the target's first choices come with its logits: see chunked_head.py")

    def __len__(self) -> int:
        return len(self.hidden)

    def to(self, device: torch.device | str) -> "StateRows":
        return StateRows(self.hidden.to(device))

    @classmethod
    def join(cls, rows: Sequence["StateRows"]) -> "StateRows":
        return cls(torch.cat([row.hidden for row in rows]))

    def comparison(
        self, draft_logits: Tensor, head: "TargetHead", part: slice, *, temperature: float = 1.0
    ) -> Comparison:
        return Comparison(draft_logits, head.log_probs(self, part, temperature=temperature))


class TargetHead:
    """The target's frozen head, cut to a draft vocabulary.

    Args:
        weight: [V, D] of the target's output embeddings; copied rows, never trained.
        vocab: the tokens whose probabilities are wanted.
        real_vocab_size: rows behind it are padding and have no probability.
        dtype: of the product; float32, or bfloat16 where the hardware multiplies it faster.
    """

    def __init__(
        self,
        weight: Tensor,
        vocab: DraftVocab,
        *,
        real_vocab_size: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        real = weight.shape[0] if real_vocab_size is None else real_vocab_size
        assert int(vocab.token_ids[-1]) < real, (int(vocab.token_ids[-1]), real)
        self.vocab = vocab
        self._full = weight.detach()[:real].to(dtype)
        self._covers_all = len(vocab) == real
        # Without a reduced vocabulary both are the same memory.
        self._kept = (
            self._full
            if self._covers_all
            else self._full[vocab.token_ids.to(weight.device)].contiguous()
        )

    @classmethod
    def of(
        cls, module: PreTrainedModel, vocab: DraftVocab, *, real_vocab_size: int | None = None
    ) -> "TargetHead":
        """The head of a transformers causal LM.

        Raises:
            ValueError: if its head has a bias, or something changes the logits behind it, which
                this form does not carry.
        """
        head = module.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise ValueError(
                f"the head of {type(module).__name__} has a bias: expected a head without one"
            )
        config = module.config.get_text_config(decoder=True)
        for name, neutral in _LOGIT_CHANGES.items():
            if (value := getattr(config, name, None)) not in (None, neutral):
                raise ValueError(
                    f"{type(module).__name__} changes its logits ({name}={value}): drafters for "
                    "such targets can not be trained yet; decode with lookup or early_exit"
                )
        return cls(head.weight, vocab, real_vocab_size=real_vocab_size)

    @property
    def kept_weight(self) -> Tensor:
        """[n, D] rows of the draft vocabulary."""
        return self._kept

    def to(self, device: torch.device | str) -> "TargetHead":
        moved = object.__new__(TargetHead)
        moved.vocab, moved._covers_all = self.vocab, self._covers_all
        moved._full = self._full.to(device)
        moved._kept = moved._full if self._covers_all else self._kept.to(device)
        return moved

    def log_probs(
        self, rows: TargetRows | StateRows, part: slice, *, temperature: float = 1.0
    ) -> Tensor:
        """[c, n] float32 log-probabilities of the kept tokens under the *full* softmax.

        `exp` of a row sums to the mass that the draft vocabulary keeps there.
        """
        hidden = rows.hidden[part].to(self._kept.dtype)
        logits = _product(hidden, self._kept)
        logits = logits if temperature == 1.0 else logits / temperature
        if self._covers_all:
            return logits.log_softmax(-1)  # the stored sum belongs to states before rounding
        assert isinstance(rows, TargetRows), "only a head over all tokens does without the sums"
        if temperature == 1.0:
            return logits.sub_(rows.log_sum_exp[part, None])
        full = _product(hidden, self._full) / temperature
        return logits - full.logsumexp(-1, keepdim=True)

    def check(self, rows: TargetRows) -> None:
        """Whether this head is the one that the states were recorded in front of.

        Raises:
            ValueError: if the stored log-sum-exps are not those of this head on these states.
        """
        hidden = rows.hidden.to(self._full.dtype)
        found = _product(hidden, self._full).logsumexp(-1)
        worst = float((found - rows.log_sum_exp).abs().max())
        if not worst <= _LSE_TOLERANCE:
            raise ValueError(
                f"the stored target states do not belong to this target's head (log-sum-exp off by "
                f"{worst:.3g}, expected at most {_LSE_TOLERANCE}): write the answers again with the "
                "target that is distilled"
            )


def live_rows(
    model: CausalModel,
    token_ids: Tensor,
    lengths: Tensor,
    positions: Tensor,
    *,
    real_vocab_size: int,
) -> TargetRows:
    """Runs the target over a right-padded batch; no gradient.

    Args: as `target_states`.

    Returns:
        The signal at those positions, states in float32.
    """
    hidden = target_states(model, token_ids, lengths, positions)
    return head_rows(model, hidden, real_vocab_size=real_vocab_size)


def head_rows(model: CausalModel, hidden: Tensor, *, real_vocab_size: int) -> TargetRows:
    """The signal at N positions, from the states [N, D] that the target's head reads there."""
    sums, best = [], []
    for chunk in hidden.split(_LIVE_CHUNK):
        logits = model.logits_of(chunk)[:, :real_vocab_size]
        sums.append(logits.logsumexp(-1))
        best.append(logits.argmax(-1))
    return TargetRows(hidden, torch.cat(sums), torch.cat(best))


def target_states(
    model: CausalModel, token_ids: Tensor, lengths: Tensor, positions: Tensor
) -> Tensor:
    """[N, D] float32: what the target's head reads at some positions of a right-padded batch.

    Args:
        token_ids: [B, S] int64.
        lengths: [B] real tokens of each row.
        positions: [N] int64 indices into the flattened [B * S] positions.
    """
    cache = model.new_cache(len(token_ids), token_ids.shape[1])
    output = model.forward(
        token_ids.to(model.device), cache, num_new=lengths, logits=False, hidden_layers=(-1,)
    )
    return output.hidden[-1].flatten(0, 1)[positions.to(model.device)]


def _product(hidden: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        return (hidden @ weight.T).float()


def rounded(states: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, D] in the wanted type, or in bfloat16 where that type can not hold a number of it."""
    stored = states.to(dtype)
    return stored if bool(stored.isfinite().all()) else states.to(torch.bfloat16)


def split_rows(rows: Rows, counts: Sequence[int]) -> list[Rows]:
    """The signals of several texts, `counts` positions each; on the CPU."""
    tensors = [getattr(rows, field.name).cpu().split(counts) for field in fields(rows)]  # type: ignore[arg-type]
    return [type(rows)(*parts) for parts in zip(*tensors, strict=True)]


def rows_at(rows: Rows, index: Tensor) -> Rows:
    """The signal at some positions, [M] int64 indices."""
    return type(rows)(*(getattr(rows, field.name)[index] for field in fields(rows)))  # type: ignore[arg-type]
