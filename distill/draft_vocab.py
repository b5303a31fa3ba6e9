"""The draft vocabulary: the target tokens that a draft model can propose, and how they are numbered.

A draft model spends most of its time in its output head. Keeping the n tokens that the target's
answers consist of makes that head, its loss and its training as much smaller; what is left out is
simply never proposed, so decoding stays exact. Of SmolLM2's 49,152 tokens the 8,192 that 76k tokens
of answers name hold 90 % of the tokens of answers not seen, 16,384 hold 95 % (measured with
`python -m distill.doctor answers_folder=...`).

Numbering and file layout are those of EAGLE-3 and the serving engines: draft ids ascend with target
ids, `d2t` holds *offsets* (target id = draft id + d2t[draft id]) and `t2d` marks the kept tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from distill.losses import OUTSIDE


@dataclass(frozen=True)
class DraftVocab:
    """Which target tokens the draft model knows.

    Attributes:
        token_ids: [n] int64 target ids, ascending, distinct.
        target_size: V, rows of the target's head, padding included.
    """

    token_ids: Tensor
    target_size: int

    def __post_init__(self) -> None:
        ids = self.token_ids
        assert ids.dtype == torch.int64, ids.dtype
        assert ids.dim() == 1, ids.shape
        assert len(ids) > 0, "an empty draft vocabulary"
        assert bool((ids.diff() > 0).all()), "token ids have to ascend"
        assert int(ids[0]) >= 0, int(ids[0])
        assert int(ids[-1]) < self.target_size, (int(ids[-1]), self.target_size)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_full(self) -> bool:
        """Whether draft ids and target ids are the same thing."""
        return len(self) == self.target_size

    @property
    def d2t(self) -> Tensor:
        """[n] int64 offsets: target id = draft id + d2t[draft id]."""
        return self.token_ids - torch.arange(len(self))

    @property
    def t2d(self) -> Tensor:
        """[V] bool: whether a target token is kept."""
        kept = torch.zeros(self.target_size, dtype=torch.bool)
        kept[self.token_ids] = True
        return kept

    def to_draft(self, target_ids: Tensor) -> Tensor:
        """Draft ids of target ids, -1 for tokens that are not kept; any shape, int64."""
        device = target_ids.device
        if device not in self._tables:  # copied once; each copy would be waited for
            self._tables[device] = self._to_draft.to(device)
        return self._tables[device][target_ids]

    @cached_property
    def _to_draft(self) -> Tensor:
        table = torch.full((self.target_size,), OUTSIDE, dtype=torch.int64)
        table[self.token_ids] = torch.arange(len(self))
        return table

    @cached_property
    def _tables(self) -> dict[torch.device, Tensor]:
        """That table by device."""
        return {}


def full_vocab(real_size: int, *, target_size: int | None = None) -> DraftVocab:
    """Every real token; rows of the head behind them are padding and never proposed."""
    return DraftVocab(torch.arange(real_size), real_size if target_size is None else target_size)


def most_frequent(
    counts: Tensor, size: int, *, always: Iterable[int], real_size: int | None = None
) -> DraftVocab:
    """The `size` most frequent tokens, `always` among them.

    Ties go to the lower id, so that equal counts give equal vocabularies.

    Args:
        counts: [V] how often the target wrote each token (integers, or summed probabilities).
        size: n, how many tokens to keep.
        always: ids kept whatever their count: end of text and the template's turn tokens.
        real_size: ids from here on are padding of the head; None = no padding.

    Raises:
        ValueError: if the size is larger than the vocabulary or too small for `always`.
    """
    target_size = len(counts)
    real_size = target_size if real_size is None else real_size
    forced = sorted(set(always))
    if not len(forced) <= size <= real_size:
        raise ValueError(
            f"draft.draft_vocab_size must be between {len(forced)} (end-of-text and turn tokens) "
            f"and {real_size} (the target's vocabulary), got {size}"
        )
    weights = counts[:real_size].double().clone()
    weights[forced] = float("inf")
    kept = weights.sort(descending=True, stable=True).indices[:size]
    return DraftVocab(kept.sort().values, target_size)


def token_counts(sequences: Iterable[Tensor], vocab_size: int) -> Tensor:
    """[V] int64: how often each token occurs in the given id sequences."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids in sequences:
        counts += torch.bincount(ids.long().flatten(), minlength=vocab_size)
    return counts


def coverage(vocab: DraftVocab, counts: Tensor) -> float:
    """The share of the counted tokens that the draft vocabulary holds; nan if none was counted."""
    total = float(counts.sum())
    return float(counts[vocab.token_ids].sum()) / total if total else float("nan")
