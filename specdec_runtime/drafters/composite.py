"""Lookup first, the model otherwise: each row takes the cheapest source that has something to say.

Where the text repeats itself, lookup drafts for free and its drafts are long; elsewhere the model
drafts. The choice depends on committed tokens only, so the output law is untouched.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_runtime.draft import (
    Draft,
    Drafter,
    DraftSession,
    TargetSharing,
    TreeSession,
    without_learning,
)
from specdec_runtime.draft_length import LengthRound
from specdec_runtime.drafters.suffix_lookup import SETTINGS as _LOOKUP_SETTINGS
from specdec_runtime.drafters.suffix_lookup import SuffixLookupDrafter
from specdec_runtime.engines import Engine
from specdec_runtime.loading import load_drafter
from specdec_runtime.sampling import Sampler
from specdec_runtime.target import Target
from specdec_runtime.tree_growth import TreeShape
from specdec_runtime.trees import DraftTree

SETTINGS = None  # those of the lookup and of the drafter behind it, which `load_drafter` checks
# What lookup finds takes the place of a draft that is likely too: only clear cases pay.
_STRICT = {"min_match": 3, "min_survival": 0.5}


class CompositeDrafter:
    """Asks `lookup` for every row, and `model` for the rows where it found nothing.

    Args:
        lookup: a drafter that costs nothing, strict enough that what it finds is likely.
        model: a drafter for everything else.

    A model that drafts on the target's own cache has to draft for every row, so it is refused.
    """

    def __init__(self, lookup: Drafter, model: Drafter) -> None:
        self.lookup = lookup
        self.model = model
        self.hidden_layers = model.hidden_layers
        self.max_positions = None  # where the model's end, lookup goes on

    def forgetful(self) -> "CompositeDrafter":
        """The same with members that do not learn."""
        return CompositeDrafter(without_learning(self.lookup), without_learning(self.model))

    def begin(self, batch_size: int, capacity: int, sampler: Sampler) -> "CompositeSession":
        first = self.lookup.begin(batch_size, capacity, sampler)
        second = self.model.begin(batch_size, capacity, sampler)
        if isinstance(second, TargetSharing):
            raise ValueError(
                "a composite of lookup and early exit is not offered: what drafts on the target's "
                "own cache has to draft for every row; use either of them alone"
            )
        if isinstance(first, TreeSession) and isinstance(second, TreeSession):
            return TreeCompositeSession(first, second)
        return CompositeSession(first, second)


def load(
    folder: str | Path | None, target: Target, *, engine: Engine | str, settings: dict[str, Any]
) -> CompositeDrafter:
    """Suffix lookup in front of the drafter that `folder` names, in any way that `load_drafter` knows.

    Settings: those of `SuffixLookupDrafter`; the others are the model's.

    Raises:
        ValueError: if no drafter is named, or for whatever is wrong with it.
    """
    model = None
    if folder is not None:
        rest = {key: value for key, value in settings.items() if key not in _LOOKUP_SETTINGS}
        model = load_drafter(folder, target, engine=engine, **rest)
    if model is None:
        raise ValueError("a composite needs a drafter behind the lookup: composite:FOLDER")
    lookup = {key: value for key, value in settings.items() if key in _LOOKUP_SETTINGS}
    return CompositeDrafter(SuffixLookupDrafter(**_STRICT | lookup), model)


class CompositeSession:
    """One session of each."""

    def __init__(self, lookup: DraftSession, model: DraftSession) -> None:
        self._lookup = lookup
        self._model = model

    def propose(
        self,
        rows: list[int],
        committed: list[list[int]],
        lengths: LengthRound,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        found = self._lookup.propose(rows, committed, lengths.part(), features)
        rest = lengths.part()
        for member, count in enumerate(found.num_drafted.tolist()):
            if count:
                rest.cap(member, 0)
        # The model sees all rows, so that it misses no features; of those found it drafts nothing.
        return _merged(found, self._model.propose(rows, committed, rest, features))

    def commit(self, rows: list[int], committed: list[list[int]]) -> None:
        self._lookup.commit(rows, committed)
        self._model.commit(rows, committed)


class TreeCompositeSession(CompositeSession):
    """Of two that can both draft trees."""

    def __init__(self, lookup: TreeSession, model: TreeSession) -> None:
        super().__init__(lookup, model)
        self._lookup: TreeSession = lookup
        self._model: TreeSession = model

    def propose_trees(
        self,
        rows: list[int],
        committed: list[list[int]],
        limits: list[int],
        shape: TreeShape,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        found = self._lookup.propose_trees(rows, committed, limits, shape, features)
        counts = found.num_drafted.tolist()
        rest = [0 if count else limit for limit, count in zip(limits, counts, strict=True)]
        drafted = self._model.propose_trees(rows, committed, rest, shape, features)
        return _merged_trees(found, drafted)


def _merged_trees(found: Draft, drafted: Draft) -> Draft:
    """Row by row whichever drafted a tree; those of lookup claim no distribution (zeros)."""
    if found.tree is None or drafted.tree is None:
        return drafted if found.tree is None else found
    num_nodes = found.num_drafted + drafted.num_drafted
    width = max(found.token_ids.shape[1], drafted.token_ids.shape[1])
    is_found = (found.num_drafted > 0)[:, None]
    ids, parents = (
        torch.where(is_found, _widened(ours.cpu(), width), _widened(theirs.cpu(), width))
        for ours, theirs in zip(found.tree[:2], drafted.tree[:2], strict=True)
    )
    probs = drafted.probs
    if probs is not None:
        probs = torch.nn.functional.pad(probs, (0, 0, 0, width + 1 - probs.shape[1]))
    return Draft(ids, num_nodes, probs, tree=DraftTree(ids, parents, num_nodes))


def _merged(found: Draft, drafted: Draft) -> Draft:
    """Row by row whichever drafted something; certain tokens next to drawn ones are one-hot."""
    if not bool(drafted.num_drafted.any()):
        return found
    if not bool(found.num_drafted.any()):
        return drafted
    device = drafted.token_ids.device
    width = max(found.token_ids.shape[1], drafted.token_ids.shape[1])
    is_found = found.num_drafted > 0
    ids = _widened(drafted.token_ids, width)
    ids[is_found] = _widened(found.token_ids.to(device), width)[is_found]
    probs = drafted.probs
    if probs is not None:
        probs = torch.nn.functional.pad(probs, (0, 0, 0, width - probs.shape[1]))
        certain = torch.nn.functional.one_hot(ids[is_found], probs.shape[-1])
        probs[is_found] = certain.to(probs.dtype)
    return Draft(ids, found.num_drafted + drafted.num_drafted, probs)


def _widened(token_ids: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(token_ids, (0, width - token_ids.shape[1]))
