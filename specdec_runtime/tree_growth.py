"""Growing token trees: which places get a node, decided before the token there is seen.

As with chains (draft_length.py), the target's distribution survives only if whether a place is
filled does not depend on the token that would stand in it. Choosing the best of tokens already
drawn breaks that, so a `GrowingTree` hands out places first: siblings are drawn in a fixed order,
and the worth of a place is known from the tokens in front of it alone.

- `StaticTree`: the same shape every round.
- `BestFirstTree`: the likeliest places under a budget of nodes. A node reached with probability
  v offers its first child at v; after a child of conditional probability r was drawn, the child
  itself is reached with v r and the next sibling offers v (1 - r) (DySpec, arXiv:2410.11744).
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

ROOT = -1  # the pending token, as a parent


@runtime_checkable
class TreeShape(Protocol):
    """A setting: how trees grow. It holds no state of any tree."""

    @property
    def num_nodes(self) -> int:
        """The most nodes of one tree."""

    @property
    def num_siblings(self) -> int:
        """The most children of one node."""

    def begin(self, limit: int) -> "GrowingTree":
        """A tree of no nodes yet that may become at most `limit` levels deep."""


class GrowingTree(Protocol):
    """One row's tree in one round.

    Attributes:
        token_ids: of the nodes so far.
        parents: their parents' positions in the same list, or ROOT.
    """

    token_ids: list[int]
    parents: list[int]

    def next_parents(self) -> list[int]:
        """Nodes (or ROOT) whose children are to be drawn in the next draft pass; empty: done."""

    def offer(self, parent: int, token_ids: Sequence[int], probs: Sequence[float]) -> None:
        """Children drawn for `parent`, in order, each with its conditional probability.

        The tree takes as many as it has places for, from the front. Ids below 0 are absent.
        """


@dataclass(frozen=True)
class StaticTree:
    """Every node at depth d has branching[d] children: (3, 2, 1) is 3 + 6 + 6 nodes."""

    branching: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.branching or min(self.branching) < 1:
            raise ValueError(f"branching is {self.branching}, expected one or more counts above 0")

    @property
    def num_nodes(self) -> int:
        return sum(itertools.accumulate(self.branching, lambda level, count: level * count))

    @property
    def num_siblings(self) -> int:
        return max(self.branching)

    def begin(self, limit: int) -> GrowingTree:
        return _StaticGrowth(self.branching[:limit])


@dataclass(frozen=True)
class BestFirstTree:
    """The `num_nodes` likeliest places, found in at most `num_passes` draft passes."""

    num_nodes: int
    num_siblings: int = 4
    num_passes: int = 4

    def __post_init__(self) -> None:
        for name in ("num_nodes", "num_siblings", "num_passes"):
            if getattr(self, name) < 1:
                raise ValueError(f"tree {name} is {getattr(self, name)}, expected 1 or more")

    def begin(self, limit: int) -> GrowingTree:
        return _BestFirstGrowth(self, min(limit, self.num_passes))


class _StaticGrowth:
    def __init__(self, branching: Sequence[int]):
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self._branching = branching
        self._depths: list[int] = []
        self._waiting = [ROOT] if branching else []

    def next_parents(self) -> list[int]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def offer(self, parent: int, token_ids: Sequence[int], probs: Sequence[float]) -> None:
        depth = 0 if parent == ROOT else self._depths[parent]
        for token in token_ids[: self._branching[depth]]:
            if token < 0:
                break
            self.token_ids.append(token)
            self.parents.append(parent)
            self._depths.append(depth + 1)
            if depth + 1 < len(self._branching):
                self._waiting.append(len(self.token_ids) - 1)


@dataclass(order=True)
class _Place:
    """A place for one more child; the likeliest comes first, then the oldest."""

    minus_value: float
    age: int
    parent: int = field(compare=False)
    sibling: int = field(compare=False)  # how many elder siblings stand in front of it


class _BestFirstGrowth:
    def __init__(self, shape: BestFirstTree, num_passes: int):
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self._shape = shape
        self._passes_left = num_passes
        self._ages = itertools.count()
        self._places = [_Place(-1.0, next(self._ages), ROOT, 0)]
        self._drawn: dict[int, list[tuple[int, float]]] = {}  # parent -> children on offer

    def next_parents(self) -> list[int]:
        self._fill()
        room = self._shape.num_nodes - len(self.token_ids)
        if not room or not self._passes_left:
            return []
        self._passes_left -= 1
        return [
            place.parent
            for place in heapq.nsmallest(room, self._places)
            if place.parent not in self._drawn
        ]

    def offer(self, parent: int, token_ids: Sequence[int], probs: Sequence[float]) -> None:
        on_offer = zip(token_ids, probs, strict=True)
        self._drawn[parent] = [(token, prob) for token, prob in on_offer if token >= 0]

    def _fill(self) -> None:
        """Fill the likeliest places whose tokens are drawn, until one has to be drawn first."""
        while self._places and len(self.token_ids) < self._shape.num_nodes:
            place = self._places[0]
            if place.parent not in self._drawn and self._passes_left:
                return
            heapq.heappop(self._places)
            children = self._drawn.get(place.parent, [])
            if place.sibling < len(children):
                self._put(place, *children[place.sibling])

    def _put(self, place: _Place, token: int, prob: float) -> None:
        self.token_ids.append(token)
        self.parents.append(place.parent)
        value = -place.minus_value
        node = len(self.token_ids) - 1
        self._open(value * prob, node, 0)
        if place.sibling + 1 < self._shape.num_siblings:
            self._open(value * (1.0 - prob), place.parent, place.sibling + 1)

    def _open(self, value: float, parent: int, sibling: int) -> None:
        heapq.heappush(self._places, _Place(-value, next(self._ages), parent, sibling))
