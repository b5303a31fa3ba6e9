"""Suffix lookup: prompt, output so far and earlier requests predict what comes next.

Like prompt lookup, but over all that has been seen, with the draft length following the evidence:
as long as the match that was found (longer matches, longer drafts), and only while the occurrences
agree. No model; strong where requests resemble each other (agents, editing, templated answers).

Deterministic, so its drafts are certain tokens (one-hot). What is known of earlier requests
changes which tokens are proposed, never the law of the text.
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from specdec_runtime.engines import Engine
from specdec_runtime.lookup import LookupSession
from specdec_runtime.occurrences import Occurrences
from specdec_runtime.sampling import Sampler
from specdec_runtime.target import Target

SETTINGS = frozenset({"corpus", "min_match", "tokens_per_match", "min_survival", "remembers"})


class SuffixLookupDrafter:
    """Proposes what most occurrences of the current end of the text went on with.

    Args:
        corpus: token ids of earlier requests (prompt and answer) to learn from.
        min_match: shortest match worth proposing from, in tokens.
        tokens_per_match: drafted tokens per matched token, at most.
        min_survival: goes on while at least this share of the occurrences agrees.
        remembers: whether what is decoded for a caller joins the corpus as it comes, for the other
            rows and later calls. Sampled text then still follows the target's distribution, but a
            seed gives the same text only for the same memory.
    """

    hidden_layers: tuple[int, ...] = ()
    max_positions: int | None = None

    def __init__(
        self,
        *,
        corpus: Iterable[Sequence[int]] = (),
        min_match: int = 2,
        tokens_per_match: float = 1.0,
        min_survival: float = 0.1,
        remembers: bool = False,
    ) -> None:
        if min_match < 1:
            raise ValueError(f"min_match is {min_match}, expected at least 1 token")
        if tokens_per_match <= 0.0:
            raise ValueError(f"tokens_per_match is {tokens_per_match}, expected above 0")
        if not 0.0 < min_survival <= 1.0:
            raise ValueError(f"min_survival is {min_survival}, expected in (0, 1]")
        self.min_match = min_match
        self.tokens_per_match = tokens_per_match
        self.min_survival = min_survival
        self.remembers = remembers
        self.corpus = Occurrences(min_match)
        for tokens in corpus:
            self.corpus.add_text(tokens)

    def begin(self, batch_size: int, capacity: int, sampler: Sampler) -> LookupSession:
        memory = self.corpus if self.remembers else None
        return LookupSession([_SuffixIndex(self, memory) for _ in range(batch_size)], sampler)

    def forgetful(self) -> "SuffixLookupDrafter":
        """The same drafter, knowing what this one knows, that does not learn."""
        twin = copy(self)
        twin.remembers = False
        return twin


def load(
    folder: str | Path | None, target: Target, *, engine: Engine | str, settings: dict[str, Any]
) -> SuffixLookupDrafter:
    """Needs no files. Settings: the arguments of `SuffixLookupDrafter`."""
    return SuffixLookupDrafter(**settings)


class _SuffixIndex:
    """One row's own text, beside what its drafter knows of earlier ones."""

    def __init__(self, drafter: SuffixLookupDrafter, memory: Occurrences | None) -> None:
        self._drafter = drafter
        self._own = Occurrences(drafter.min_match)
        self._own.add_text()
        self._memory = memory
        # The row joins the memory as it grows, so an interrupted call has taught what it decoded.
        self._text = -1 if memory is None else memory.add_text()

    def continuation(self, tokens: list[int], limit: int) -> list[int]:
        """The better of what this text and what the earlier ones predict."""
        found = [
            source.continuation(
                tokens,
                limit,
                min_survival=self._drafter.min_survival,
                tokens_per_match=self._drafter.tokens_per_match,
            )
            for source in self._sources(tokens)
        ]
        return max(found, key=lambda continuation: sum(continuation.survival)).token_ids

    def branches(self, tokens: list[int], limit: int) -> Iterator[tuple[list[int], float]]:
        """All occurrences; the longer the match, the more its vote counts."""
        for source in self._sources(tokens):
            for following, length in source.continuations(
                tokens, limit, tokens_per_match=self._drafter.tokens_per_match
            ):
                yield following, float(length)

    def commit(self, tokens: list[int]) -> None:
        if self._memory is not None:
            self._memory.extend(self._text, tokens[self._memory.length(self._text) :])

    def _sources(self, tokens: list[int]) -> tuple[Occurrences, Occurrences]:
        self._own.extend(0, tokens[self._own.length(0) :])
        return self._own, self._drafter.corpus
