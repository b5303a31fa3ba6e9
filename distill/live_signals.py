"""The live form: the target runs beside the drafter, on each batch as it is taken.

The target is no part of the trained module: it is not wrapped for many processes, has its own dtype
and device, runs in eval mode without a gradient (`CausalModel.forward` sees to both), and every
process has its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from distill.batches import Batch, Example, collate
from distill.draft_vocab import DraftVocab
from distill.losses import TARGET_FREE, LossConfig
from distill.signals import (
    NoSignal,
    StateRows,
    TargetRows,
    live_rows,
    split_rows,
    target_states,
)
from specdec_runtime.target import Target

T = TypeVar("T", bound=Example)

_NOTHING = NoSignal(0)  # stands for a signal that is not looked at


@dataclass(frozen=True)
class LiveSignals:
    """Batches of a stream, with what the target says about them now.

    Attributes:
        stream: number of a micro-batch -> the batch; whatever signal it has is replaced.
        states_only: leave out the target's own head, see `states_suffice`.
    """

    stream: Callable[[int], Batch]
    target: Target
    states_only: bool = False

    def __call__(self, number: int) -> Batch:
        batch = self.stream(number)
        if not self.states_only:
            return replace(batch, rows=_rows(self.target, batch))
        lengths = lengths_of(batch)
        hidden = target_states(self.target.model, batch.token_ids, lengths, batch.positions)
        return replace(batch, rows=StateRows(hidden))


def states_suffice(target: Target, vocab: DraftVocab, loss: LossConfig) -> bool:
    """Whether a loss makes the target's logits of all tokens itself, and at every position."""
    return len(vocab) == target.real_vocab_size and loss.name not in TARGET_FREE


def with_live_states(
    target: Target, examples: Sequence[T], *, max_positions: int, batch_tokens: int = 2048
) -> list[T]:
    """The first examples, up to a number of loss positions, with the target's hidden states."""
    found: list[T] = []
    taken = 0
    for group in groups_of(examples, batch_tokens):
        rows = _rows(target, collate([replace(example, rows=_NOTHING) for example in group]))
        parts = split_rows(rows, [example.num_tokens for example in group])
        found += [replace(example, rows=part) for example, part in zip(group, parts, strict=True)]
        taken += len(rows)
        if taken >= max_positions:
            break
    return found


def groups_of(examples: Sequence[T], max_tokens: int) -> list[list[T]]:
    """Consecutive examples, as many as fit into `max_tokens` padded tokens; one at least."""
    groups: list[list[T]] = []
    width = 0
    for example in examples:
        width = max(width, len(example.token_ids))
        if not groups or (len(groups[-1]) + 1) * width > max_tokens:
            groups.append([])
            width = len(example.token_ids)
        groups[-1].append(example)
    return groups


def lengths_of(batch: Batch) -> Tensor:
    """[B], on the host: how many tokens of each row the target has to read, those up to its last loss
    position."""
    return torch.tensor([max(last + 1, 1) for _, last in batch.spans])


def _rows(target: Target, batch: Batch) -> TargetRows:
    return live_rows(
        target.model,
        batch.token_ids,
        lengths_of(batch),
        batch.positions,
        real_vocab_size=target.real_vocab_size,
    )
