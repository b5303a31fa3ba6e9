"""Prompt lookup: what followed the last few tokens the last time they occurred.

No model and no training; good where the output repeats the prompt or itself (editing, quoting,
code). Deterministic, so its drafts are certain tokens (one-hot) for verification.

Source: Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding. Ours differs in two points: the
newest earlier occurrence wins, and a match that runs into the end of the text goes on with the
tokens it has just proposed, so a loop of any period is followed for the whole draft.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec_runtime.branches import Branch
from specdec_runtime.draft import Draft, chains
from specdec_runtime.draft_length import LengthRound
from specdec_runtime.engines import Engine
from specdec_runtime.sampling import Sampler
from specdec_runtime.target import Target
from specdec_runtime.tree_drafting import certain_trees
from specdec_runtime.tree_growth import TreeShape

_MAX_BRANCHES = 16  # occurrences of one suffix that a tree is grown from


class PromptLookupDrafter:
    """Proposes the continuation of the newest earlier occurrence of the longest matching suffix.

    Args:
        max_ngram: longest suffix to look for, in tokens.
        min_ngram: shortest suffix worth proposing from.
    """

    hidden_layers: tuple[int, ...] = ()
    max_positions: int | None = None

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                f"min_ngram={min_ngram}, max_ngram={max_ngram}: expected 1 <= min_ngram <= max_ngram"
            )
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def begin(self, batch_size: int, capacity: int, sampler: Sampler) -> "PromptLookupSession":
        sizes = range(self.min_ngram, self.max_ngram + 1)
        return PromptLookupSession([_NgramIndex(sizes) for _ in range(batch_size)])


def load(
    folder: str | Path | None, target: Target, *, engine: Engine | str, settings: dict[str, Any]
) -> PromptLookupDrafter:
    """Needs no files. Settings: `max_ngram`, `min_ngram`."""
    return PromptLookupDrafter(**settings)


class PromptLookupSession:
    """One table of n-grams per row, over committed tokens only: nothing to roll back."""

    def __init__(self, tables: list["_NgramIndex"]) -> None:
        self._tables = tables

    def propose(
        self,
        rows: list[int],
        committed: list[list[int]],
        lengths: LengthRound,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        found = []
        for member, (row, tokens) in enumerate(zip(rows, committed, strict=True)):
            table = self._tables[row]
            table.extend(tokens)
            found.append(table.match(tokens))
            if found[-1] is None:
                lengths.cap(member, 0)
        while lengths.ask():
            lengths.tell(None)
        return chains(
            [
                [] if end is None else continuation(tokens, end, count)
                for tokens, end, count in zip(committed, found, lengths.num_drafted, strict=True)
            ]
        )

    def propose_trees(
        self,
        rows: list[int],
        committed: list[list[int]],
        limits: list[int],
        shape: TreeShape,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        """The newest occurrences as branches; those of a longer suffix lead."""
        branches = []
        for row, tokens, limit in zip(rows, committed, limits, strict=True):
            table = self._tables[row]
            table.extend(tokens)
            branches.append(
                Branch.merged(
                    (continuation(tokens, end, min(limit, shape.num_nodes)), float(size))
                    for size, end in table.matches(tokens)
                )
            )
        return certain_trees(branches, limits, shape)

    def commit(self, rows: list[int], committed: list[list[int]]) -> None:
        pass


class _NgramIndex:
    """Where each n-gram of a growing text has ended, newest last."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._num_indexed = 0

    def extend(self, tokens: list[int]) -> None:
        """Index the n-grams that end before the last token; that one is still to be matched."""
        for end in range(self._num_indexed + 1, len(tokens)):
            for size in self._sizes:
                if end >= size:
                    self._ends[tuple(tokens[end - size : end])].append(end)
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)

    def match(self, tokens: list[int]) -> int | None:
        """Where the newest earlier occurrence of the longest known suffix of `tokens` ended."""
        return next((end for _, end in self.matches(tokens)), None)

    def matches(self, tokens: list[int]) -> Iterator[tuple[int, int]]:
        """(size, end) of earlier occurrences of the suffixes of `tokens`, each end once: longest
        suffix first, newest first, a few of each size."""
        seen: set[int] = set()
        for size in reversed(self._sizes):
            ends = self._ends.get(tuple(tokens[-size:]), []) if len(tokens) >= size else []
            for end in reversed(ends[-_MAX_BRANCHES:]):
                if end not in seen:
                    seen.add(end)
                    yield size, end


def continuation(tokens: list[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on; past the end of the text, the ones just copied follow."""
    copied = list(tokens[start : start + count])
    while len(copied) < count:
        copied.append(copied[start + len(copied) - len(tokens)])
    return copied
