"""Suffix lookup: prompt, output so far and earlier requests predict what comes next.

Like prompt lookup, but over all that has been seen, with the draft length following the evidence:
as long as the match that was found (longer matches, longer drafts), and only while the occurrences
agree. No model; strong where requests resemble each other (agents, editing, templated answers).

Deterministic, so its drafts are certain tokens (one-hot). What is known of earlier requests
changes which tokens are proposed, never the law of the text.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec_runtime.branches import Branch
from specdec_runtime.draft import Draft, chains
from specdec_runtime.draft_length import LengthRound
from specdec_runtime.engines import Engine
from specdec_runtime.occurrences import Occurrences
from specdec_runtime.sampling import Sampler
from specdec_runtime.target import Target
from specdec_runtime.tree_drafting import certain_trees
from specdec_runtime.tree_growth import TreeShape


class SuffixLookupDrafter:
    """Proposes what most occurrences of the current end of the text went on with.

    Args:
        corpus: token ids of earlier requests (prompt and answer) to learn from.
        min_match: shortest match worth proposing from, in tokens.
        tokens_per_match: drafted tokens per matched token, at most.
        min_survival: goes on while at least this share of the occurrences agrees.
        remembers: whether what is decoded joins the corpus as it comes, for the other rows and
            later calls. Sampled text then still follows the target's distribution, but a seed
            gives the same text only for the same memory.
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
        self._corpus = Occurrences(min_match)
        for tokens in corpus:
            self._corpus.add_text(tokens)

    def begin(self, batch_size: int, capacity: int, sampler: Sampler) -> "SuffixLookupSession":
        corpus = self._corpus if self.remembers else None
        return SuffixLookupSession(self, batch_size, corpus)

    def longest(self, own: Occurrences, tokens: list[int], limit: int) -> list[int]:
        """The better of what this text and what the earlier ones predict."""
        found = [
            source.continuation(
                tokens,
                limit,
                min_survival=self.min_survival,
                tokens_per_match=self.tokens_per_match,
            )
            for source in (own, self._corpus)
        ]
        return max(found, key=lambda continuation: sum(continuation.survival)).token_ids

    def branches(self, own: Occurrences, tokens: list[int], limit: int) -> Branch:
        """Everything that this text and the earlier ones predict."""
        return Branch.merged(
            (following, float(length))
            for source in (own, self._corpus)
            for following, length in source.continuations(
                tokens, limit, tokens_per_match=self.tokens_per_match
            )
        )


def load(
    folder: str | Path | None, target: Target, *, engine: Engine | str, settings: dict[str, Any]
) -> SuffixLookupDrafter:
    """Needs no files. Settings: the arguments of `SuffixLookupDrafter`."""
    return SuffixLookupDrafter(**settings)


class SuffixLookupSession:
    """Each row's own text, committed tokens only, and the shared corpus: nothing to roll back."""

    def __init__(
        self, drafter: SuffixLookupDrafter, batch_size: int, corpus: Occurrences | None
    ) -> None:
        self._drafter = drafter
        self._own = [Occurrences(drafter.min_match) for _ in range(batch_size)]
        for occurrences in self._own:
            occurrences.add_text()
        self._corpus = corpus
        # Rows join the corpus as they grow, so an interrupted call has taught what it decoded.
        self._texts = [corpus.add_text() for _ in range(batch_size)] if corpus else []

    def propose(
        self,
        rows: list[int],
        committed: list[list[int]],
        lengths: LengthRound,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        found = []
        for member, (row, tokens) in enumerate(zip(rows, committed, strict=True)):
            self._read(row, tokens)
            limit = lengths.limit(member)
            found.append(self._drafter.longest(self._own[row], tokens, limit))
            lengths.cap(member, len(found[-1]))
        while lengths.ask():
            lengths.tell(None)
        counts = lengths.num_drafted
        return chains([tokens[:count] for tokens, count in zip(found, counts, strict=True)])

    def propose_trees(
        self,
        rows: list[int],
        committed: list[list[int]],
        limits: list[int],
        shape: TreeShape,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        """All occurrences as branches; the longer the match, the more its vote counts."""
        branches = []
        for row, tokens, limit in zip(rows, committed, limits, strict=True):
            self._read(row, tokens)
            depth = min(limit, shape.num_nodes)
            branches.append(self._drafter.branches(self._own[row], tokens, depth))
        return certain_trees(branches, limits, shape)

    def commit(self, rows: list[int], committed: list[list[int]]) -> None:
        if self._corpus is None:
            return
        for row, tokens in zip(rows, committed, strict=True):
            text = self._texts[row]
            self._corpus.extend(text, tokens[self._corpus.length(text) :])

    def _read(self, row: int, tokens: list[int]) -> None:
        own = self._own[row]
        own.extend(0, tokens[own.length(0) :])
