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

from specdec_runtime.engines import Engine
from specdec_runtime.lookup import LookupSession
from specdec_runtime.sampling import Sampler
from specdec_runtime.target import Target

SETTINGS = frozenset({"max_ngram", "min_ngram"})

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

    def begin(self, batch_size: int, capacity: int, sampler: Sampler) -> LookupSession:
        sizes = range(self.min_ngram, self.max_ngram + 1)
        return LookupSession([_NgramIndex(sizes) for _ in range(batch_size)], sampler)


def load(
    folder: str | Path | None, target: Target, *, engine: Engine | str, settings: dict[str, Any]
) -> PromptLookupDrafter:
    """Needs no files. Settings: `max_ngram`, `min_ngram`."""
    return PromptLookupDrafter(**settings)


class _NgramIndex:
    """Where each n-gram of a row's growing text has ended, newest last."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._num_indexed = 0

    def continuation(self, tokens: list[int], limit: int) -> list[int]:
        """What followed the newest earlier occurrence of the longest known suffix."""
        end = next((end for _, end in self._matches(tokens)), None)
        return [] if end is None else continuation(tokens, end, limit)

    def branches(self, tokens: list[int], limit: int) -> Iterator[tuple[list[int], float]]:
        """What followed the newest occurrences; those of a longer suffix lead."""
        for size, end in self._matches(tokens):
            yield continuation(tokens, end, limit), float(size)

    def commit(self, tokens: list[int]) -> None:
        """Nothing: what is final is indexed when it is next looked up."""

    def _extend(self, tokens: list[int]) -> None:
        """Index the n-grams that end before the last token; that one is still to be matched."""
        for end in range(self._num_indexed + 1, len(tokens)):
            for size in self._sizes:
                if end >= size:
                    self._ends[tuple(tokens[end - size : end])].append(end)
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)

    def _matches(self, tokens: list[int]) -> Iterator[tuple[int, int]]:
        """(size, end) of earlier occurrences of the suffixes of `tokens`, each end once: longest
        suffix first, newest first, a few of each size."""
        self._extend(tokens)
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
