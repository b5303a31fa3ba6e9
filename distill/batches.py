"""Answers -> training batches, in an order that is a function of (seed, epoch, number) alone.

A batch is a few whole conversations, right-padded; nothing is packed, so nothing can leak. Where a
run stands in its data is one number, the batches taken so far, so a resumed run continues exactly.

    example ids   p1 p2 p3 a1 a2 EOS      prompt_length 3
    loss at        -  -  x  x  x  -       the positions that predict a1, a2 and EOS

Shapes: B rows, S tokens of the longest row, N loss positions of a batch, D hidden size.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from distill.signals import SignalRows, TargetRows

# Rows of similar length are batched together; the window is how far they may come from each other.
_WINDOW = 256


@dataclass(frozen=True)
class Example:
    """One conversation to learn from.

    Attributes:
        id: the prompt's, for messages and logs.
        token_ids: [S] int64, prompt and answer.
        prompt_length: tokens in front of the answer; at least one.
        rows: the target's signal at each of the S - prompt_length answer tokens.
        features: [S, F] the target's inner hidden states at every token, for drafters that read
            them (features.py); None = not recorded.
    """

    id: str
    token_ids: Tensor
    prompt_length: int
    rows: SignalRows
    features: Tensor | None = field(default=None, kw_only=True)

    @property
    def num_tokens(self) -> int:
        """Loss positions."""
        return len(self.token_ids) - self.prompt_length


@dataclass
class Batch:
    """One micro-batch.

    Attributes:
        ids: of its examples.
        token_ids: [B, S] int64, right-padded with 0 (padding is never looked at: attention is
            causal and no loss position follows it).
        positions: [N] int64 into the flattened [B * S]: where the next token is an answer's.
        labels: [N] int64 target ids of those next tokens.
        spans: of each row the columns of its first and last loss position; numbers of the host, so
            that whoever needs a size of them waits for no device.
        rows: the target's signal at the same positions.
        features: [B, S, F] of its examples, or None.
        draft_rows: the batch in the drafter's own tokens, where those are others
            (draft_contexts.py); None = made when it is asked for.
        weights: [N] how much each position counts, with a mean of one; None = all alike.
        replay: refused drafts to learn from as well (on_policy.py), or None.
    """

    ids: list[str]
    token_ids: Tensor
    positions: Tensor
    labels: Tensor
    spans: list[tuple[int, int]]
    rows: SignalRows
    features: Tensor | None = None
    draft_rows: "DraftRows | None" = None
    weights: Tensor | None = None
    replay: "Batch | None" = None

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def target_states(self) -> Tensor:
        """[N, D] the target's last hidden states at the loss positions.

        Raises:
            ValueError: if the signal has another form.
        """
        if not isinstance(self.rows, TargetRows):
            raise ValueError(
                "the target's hidden states are needed here: choose signals.form=hidden or live"
            )
        return self.rows.hidden

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(
            self.ids,
            self.token_ids.to(device),
            self.positions.to(device),
            self.labels.to(device),
            self.spans,
            self.rows.to(device),
            None if self.features is None else self.features.to(device),
            None if self.draft_rows is None else self.draft_rows.to(device),
            None if self.weights is None else self.weights.to(device),
            None if self.replay is None else self.replay.to(device),
        )


@dataclass(frozen=True)
class DraftRows:
    """A batch in the drafter's tokens: R rows of S draft tokens, M of the batch's N loss positions
    kept, P positions of the answers in draft tokens.

    Attributes:
        token_ids: [R, S] int64, right-padded.
        kept: [M] int64, which of the batch's N positions have a place here.
        positions: [M] int64 into the flattened [R * S]: where the drafter speaks about them.
        text_positions: [P] int64 into the same: where its next token is one of the answer's.
        text_labels: [P] int64 draft ids of those next tokens.
    """

    token_ids: Tensor
    kept: Tensor
    positions: Tensor
    text_positions: Tensor
    text_labels: Tensor

    def to(self, device: torch.device | str) -> "DraftRows":
        return DraftRows(*(getattr(self, one.name).to(device) for one in fields(self)))


class BatchStream:
    """An endless stream of micro-batches over a set of examples.

    Args:
        examples: those without a loss position are dropped and counted in `num_dropped`.
        max_tokens: padded tokens of a micro-batch; a longer example is a batch of its own.
        seed: of the order, which differs from epoch to epoch.

    Raises:
        ValueError: if no example has anything to learn from.
    """

    def __init__(self, examples: Sequence[Example], *, max_tokens: int, seed: int) -> None:
        self.examples = [example for example in examples if example.num_tokens > 0]
        self.num_dropped = len(examples) - len(self.examples)
        if not self.examples:
            raise ValueError(
                f"none of {len(examples)} answers has a token to learn from: expected answers "
                "behind their prompts; raise answers.max_new_tokens or shorten the prompts"
            )
        self._max_tokens, self._seed = max_tokens, seed
        self._first: list[int] = [0]  # number of the first batch of each epoch known so far
        self._epoch = -1
        self._plan: list[list[int]] = []

    @property
    def num_tokens(self) -> int:
        """Loss positions of an epoch."""
        return sum(example.num_tokens for example in self.examples)

    def __call__(self, number: int) -> Batch:
        """Micro-batch `number`, counted from 0 over all epochs."""
        return collate(self.examples_of(number))

    def examples_of(self, number: int) -> list[Example]:
        """What micro-batch `number` is made of."""
        epoch, place = self._locate(number)
        if epoch != self._epoch:
            self._epoch, self._plan = epoch, self._plan_of(epoch)
        return [self.examples[index] for index in self._plan[place]]

    def epoch_of(self, number: int) -> int:
        return self._locate(number)[0]

    def _locate(self, number: int) -> tuple[int, int]:
        while number >= self._first[-1]:
            epoch = len(self._first) - 1
            self._first.append(self._first[-1] + len(self._plan_of(epoch)))
        epoch = next(i for i in range(len(self._first) - 1) if number < self._first[i + 1])
        return epoch, number - self._first[epoch]

    def _plan_of(self, epoch: int) -> list[list[int]]:
        """The examples of each batch of an epoch: shuffled, then sorted by length within windows so
        that little is padding, then the batches shuffled."""
        order = random.Random(f"{self._seed}/{epoch}")
        indices = list(range(len(self.examples)))
        order.shuffle(indices)
        batches: list[list[int]] = []
        for start in range(0, len(indices), _WINDOW):
            window = indices[start : start + _WINDOW]
            window.sort(key=lambda index: len(self.examples[index].token_ids))
            batches += self._filled(window)
        order.shuffle(batches)
        return batches

    def _filled(self, ascending: list[int]) -> list[list[int]]:
        batches: list[list[int]] = [[]]
        for index in ascending:
            width = len(self.examples[index].token_ids)
            if batches[-1] and (len(batches[-1]) + 1) * width > self._max_tokens:
                batches.append([])
            batches[-1].append(index)
        return batches


def collate(examples: Sequence[Example]) -> Batch:
    """Pads examples to one batch."""
    token_ids = pad_sequence([example.token_ids for example in examples], batch_first=True)
    width = token_ids.shape[1]
    positions = [
        row * width + torch.arange(example.prompt_length - 1, len(example.token_ids) - 1)
        for row, example in enumerate(examples)
    ]
    rows = [example.rows for example in examples]
    spans = [(example.prompt_length - 1, len(example.token_ids) - 2) for example in examples]
    features = [example.features for example in examples if example.features is not None]
    return Batch(
        ids=[example.id for example in examples],
        token_ids=token_ids,
        positions=torch.cat(positions),
        labels=torch.cat([example.token_ids[example.prompt_length :] for example in examples]),
        spans=spans,
        rows=type(rows[0]).join(rows),
        features=pad_sequence(features, batch_first=True) if features else None,
    )
