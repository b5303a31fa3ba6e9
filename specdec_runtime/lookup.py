"""Drafting by lookup: the session of the kinds that need no model.

A kind says where it looks (`RowLookup`, one for each row); whatever it finds is drafted as certain
tokens (one-hot). It reads committed tokens only, so nothing has to be rolled back.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from specdec_runtime.branches import Branch
from specdec_runtime.chain import certain_chains
from specdec_runtime.draft import Draft
from specdec_runtime.draft_length import LengthRound
from specdec_runtime.draft_vocabulary import Proposable
from specdec_runtime.sampling import Sampler
from specdec_runtime.tree_drafting import certain_trees
from specdec_runtime.tree_growth import TreeShape


class RowLookup(Protocol):
    """Where one row's continuation is looked up; `tokens` are all its committed tokens."""

    def continuation(self, tokens: list[int], limit: int) -> list[int]:
        """What to draft, at most `limit` tokens; [] = nothing was found."""

    def branches(self, tokens: list[int], limit: int) -> Iterable[tuple[Sequence[int], float]]:
        """Everything that was found, each at most `limit` tokens long, and its votes."""

    def commit(self, tokens: list[int]) -> None:
        """Take note of what has become final."""


class LookupSession:
    """One source a row."""

    def __init__(self, sources: Sequence[RowLookup], sampler: Sampler) -> None:
        self._sources = sources
        self._proposable = Proposable(sampler)

    def propose(
        self,
        rows: list[int],
        committed: list[list[int]],
        lengths: LengthRound,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        found = [
            self._proposable.part(self._sources[row].continuation(tokens, lengths.limit(member)))
            for member, (row, tokens) in enumerate(zip(rows, committed, strict=True))
        ]
        return certain_chains(found, lengths)

    def propose_trees(
        self,
        rows: list[int],
        committed: list[list[int]],
        limits: list[int],
        shape: TreeShape,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        branches = [
            Branch.merged(
                (self._proposable.part(following), votes)
                for following, votes in self._sources[row].branches(
                    tokens, min(limit, shape.num_nodes)
                )
            )
            for row, tokens, limit in zip(rows, committed, limits, strict=True)
        ]
        return certain_trees(branches, limits, shape)

    def commit(self, rows: list[int], committed: list[list[int]]) -> None:
        for row, tokens in zip(rows, committed, strict=True):
            self._sources[row].commit(tokens)
