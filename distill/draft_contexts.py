"""A batch of the target's texts as a drafter with another tokenizer reads it.

The target's signal stands at the target's tokens. A drafter that has read the same text, re-encoded in
its own tokens, can be compared with it there, on the tokens that both vocabularies have: that is what
the runtime does (`specdec_runtime.drafters.cross_tokenizer`), and the contexts come from its own
`Retokenized`, so that both read the same ids.

    target    The| cat|s| sat           signal behind each of its tokens
    drafter   Th|e| cats| sat           behind "The", "The cats" and "The cats sat" also it stands between
                                        tokens; " cat" ends inside one of its own

One reading of the text serves all places of the first sort. For one of the second, the runtime reads the
text up to there on its own; a row for each would multiply the work, so training leaves them out (and
counts them) and scoring has them.

Shapes: N loss positions of a batch in target tokens, M of them kept, R rows of S draft tokens,
P positions of the answers in draft tokens.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distill.batches import Batch, DraftRows
from specdec_runtime.model import right_padded
from specdec_runtime.retokenized import Retokenized

_TEXTS_KEPT = 20_000  # re-encoded once, used in every epoch


class _Text(NamedTuple):
    whole: tuple[int, ...]  # the text with its answer
    contexts: tuple[tuple[int, ...] | None, ...]  # at each place; None inside a character


class DraftContexts:
    """Re-encodes batches.

    Args:
        max_positions: of the drafter; what lies behind is left out, as it is when decoding.
    """

    def __init__(self, tokenizer: Any, target_tokenizer: Any, *, max_positions: int) -> None:
        self._tokenizer, self._target_tokenizer = tokenizer, target_tokenizer
        self._max_positions = max_positions
        self._read = lru_cache(_TEXTS_KEPT)(self._read_anew)

    def __call__(self, batch: Batch, *, scoring: bool) -> DraftRows:
        """The batch in draft tokens, on its device.

        Args:
            scoring: give every place the context that the runtime has there, at whatever cost.
        """
        found = _Rows()
        for text, first in self._texts(batch):
            row = found.add_row(text.whole)
            starts = [context for context in text.contexts if context is not None]
            if starts:
                found.add_answer(row, _common(starts[0], text.whole))
            for place, context in enumerate(text.contexts):
                if context is None or len(context) > self._max_positions:
                    continue
                if context == text.whole[: len(context)]:
                    found.keep(first + place, row, len(context))
                elif scoring:
                    found.keep(first + place, found.add_row(context), len(context))
        return found.tensors(batch.token_ids.device)

    def _texts(self, batch: Batch) -> list[tuple[_Text, int]]:
        """Each text that has loss positions, and the number of its first one in the batch."""
        width = batch.token_ids.shape[1]
        rows, columns = (batch.positions // width).tolist(), (batch.positions % width).tolist()
        token_ids = batch.token_ids.tolist()
        texts: list[tuple[_Text, int]] = []
        for row in dict.fromkeys(rows):
            first = rows.index(row)
            places = tuple(columns[first : first + rows.count(row)])
            texts.append((self._read(tuple(token_ids[row][: places[-1] + 2]), places), first))
        return texts

    def _read_anew(self, tokens: tuple[int, ...], places: tuple[int, ...]) -> _Text:
        """The text, and its contexts: behind the target token at each of the places."""
        text = Retokenized(self._tokenizer, self._target_tokenizer)
        contexts: list[tuple[int, ...] | None] = []
        for place in places:
            text.read(list(tokens[: place + 1]))
            contexts.append(tuple(text.draft_ids) if text.is_whole and text.draft_ids else None)
        end, own_end = self._target_tokenizer.eos_token_id, self._tokenizer.eos_token_id
        is_ended = tokens[-1] == end and own_end is not None
        text.read(list(tokens[:-1] if is_ended else tokens))
        whole = [*text.draft_ids, own_end] if is_ended else text.draft_ids
        return _Text(tuple(whole[: self._max_positions]), tuple(contexts))


class _Rows:
    """`DraftRows` while they are collected."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []
        self.kept: list[int] = []
        self.places: list[tuple[int, int]] = []  # (row, column) of each kept one
        self.text_places: list[tuple[int, int]] = []

    def add_row(self, ids: tuple[int, ...]) -> int:
        self.rows.append(ids)
        return len(self.rows) - 1

    def add_answer(self, row: int, start: int) -> None:
        """The tokens from `start` on are the answer's."""
        last = len(self.rows[row]) - 1
        self.text_places += [(row, column) for column in range(max(start, 1) - 1, last)]

    def keep(self, position: int, row: int, length: int) -> None:
        self.kept.append(position)
        self.places.append((row, length - 1))

    def tensors(self, device: torch.device) -> DraftRows:
        token_ids, _ = right_padded([list(row) for row in self.rows])
        width = token_ids.shape[1]
        flat = [row * width + column for row, column in self.text_places]
        labels = [self.rows[row][column + 1] for row, column in self.text_places]
        return DraftRows(
            token_ids.to(device),
            _int64(self.kept, device),
            _int64([row * width + column for row, column in self.places], device),
            _int64(flat, device),
            _int64(labels, device),
        )


def _int64(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many ids both begin with."""
    length = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        length += 1
    return length
