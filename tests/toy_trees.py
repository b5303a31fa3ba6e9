"""The exactness kit for token trees: every tree and every walk through it, with its probability.

As in toy_models.py, the rule under test is a black box: the points at which its outcome changes
in each of its uniform numbers are found by bisection.
"""

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_runtime.tree_growth import ROOT, GrowingTree, TreeShape
from specdec_runtime.trees import DraftTree, pack_trees
from tests.toy_models import (
    NEGLIGIBLE,
    Text,
    bisect,
    decode_law,
    largest_error,
    next_token_probs,
    text_law,
)

# (draft distribution [V], number of siblings) -> every ordered outcome with its probability
Draws = Callable[[Sequence[float], int], Iterator[tuple[Text, float]]]


def without_replacement(probs: Sequence[float], count: int) -> Iterator[tuple[Text, float]]:
    """Ordered distinct draws; shorter where the distribution runs out of tokens."""
    possible = [token for token, prob in enumerate(probs) if prob > 0.0]
    for tokens in itertools.permutations(possible, min(count, len(possible))):
        mass, left = 1.0, 1.0
        for token in tokens:
            mass *= probs[token] / left
            left -= probs[token]
        yield tokens, mass


def with_replacement(probs: Sequence[float], count: int) -> Iterator[tuple[Text, float]]:
    """Independent draws: what siblings must not be (a negative control)."""
    for tokens in itertools.product(range(len(probs)), repeat=count):
        mass = 1.0
        for token in tokens:
            mass *= probs[token]
        yield tokens, mass


def likeliest(probs: Sequence[float], count: int) -> Iterator[tuple[Text, float]]:
    """The most likely tokens, for certain."""
    yield tuple(sorted(range(len(probs)), key=lambda token: -probs[token])[:count]), 1.0


class EnumeratedTrees(NamedTuple):
    """Every tree that can grow after any start token."""

    tree: DraftTree  # [P] rows
    starts: Tensor  # [P]
    mass: Tensor  # [P] float64; sums to 1 for each start


def enumerate_trees(
    table: Tensor, shape: TreeShape, draws: Draws, limit: int = 8
) -> EnumeratedTrees:
    """All trees of one round, drafted from `table` [V, V]."""
    found: dict[tuple[int, Text, Text], float] = defaultdict(float)

    def grow(tree: GrowingTree, start: int, mass: float) -> None:
        parents = tree.next_parents()
        if not parents:
            found[start, tuple(tree.token_ids), tuple(tree.parents)] += mass
            return
        contexts = [start if parent == ROOT else tree.token_ids[parent] for parent in parents]
        options = [list(draws(table[context].tolist(), shape.num_siblings)) for context in contexts]
        for choice in itertools.product(*options):
            branch, branch_mass = copy.deepcopy(tree), mass
            for parent, context, (tokens, prob) in zip(parents, contexts, choice, strict=True):
                branch.offer(parent, tokens, _conditional(table[context].tolist(), tokens))
                branch_mass *= prob
            grow(branch, start, branch_mass)

    for start in range(len(table)):
        grow(shape.begin(limit), start, 1.0)
    keys = list(found)
    tree = pack_trees([list(tokens) for _, tokens, _ in keys], [list(up) for _, _, up in keys])
    mass = torch.tensor([found[key] for key in keys], dtype=torch.float64)
    return EnumeratedTrees(tree, torch.tensor([start for start, _, _ in keys]), mass)


class _Walk(NamedTuple):
    """A partial walk through tree `row`, and the uniforms that lead to it."""

    row: int
    node: int
    siblings: list[int]  # columns still to be tested at `node`
    kept: Text
    uniforms: list[float]
    mass: float


def tree_round_laws(
    verify: Callable, target: Tensor, table: Tensor | None, trees: EnumeratedTrees
) -> list[dict[Text, float]]:
    """For each start token, the probability of every burst (kept tokens and the next one).

    Args:
        table: what verification is told the siblings were drawn from; None = certain.
    """
    tokens, parents = trees.tree.token_ids.tolist(), trees.tree.parents.tolist()
    sizes = trees.tree.num_nodes.tolist()
    width = trees.tree.token_ids.shape[1]
    contexts = torch.cat([trees.starts[:, None], trees.tree.token_ids], 1)  # [P, N + 1]

    def children(row: int, node: int) -> list[int]:
        return [column for column in range(sizes[row]) if parents[row][column] == node]

    def run(index: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        tree = DraftTree(*(part[index] for part in trees.tree))
        near = contexts[index]
        verdict = verify(tree, None if table is None else table[near], target[near], uniforms)
        return verdict.path, verdict.next_token_ids

    walks = [
        _Walk(row, ROOT, children(row, ROOT), (), [], mass)
        for row, mass in enumerate(trees.mass.tolist())
    ]
    ended: list[_Walk] = []
    for step in range(width + 1):
        ended += [walk for walk in walks if not walk.siblings]
        walks = [walk for walk in walks if walk.siblings]
        if not walks:
            break
        keeps = _keep_thresholds(run, walks, step, width)
        walks = [
            branch
            for walk, keep in zip(walks, keeps, strict=True)
            for branch in _branches(walk, keep, children)
            if branch.mass > NEGLIGIBLE
        ]
    rows = torch.tensor([walk.row for walk in ended])
    uniforms = torch.stack([_padded(walk.uniforms, width) for walk in ended])
    after = next_token_probs(
        lambda index, u: torch.stack([run(index, u)[1]] * 2, 1), rows, uniforms, len(target)
    )
    laws: list[dict[Text, float]] = [defaultdict(float) for _ in target]
    for walk, probs in zip(ended, after.tolist(), strict=True):
        burst = tuple(tokens[walk.row][column] for column in walk.kept)
        for token, prob in enumerate(probs):
            laws[int(trees.starts[walk.row])][(*burst, token)] += walk.mass * prob
    return laws


def tree_error(
    verify: Callable,
    target: Tensor,
    drafted: Tensor,
    shape: TreeShape,
    *,
    draws: Draws = without_replacement,
    claimed: Tensor | None,
    length: int = 3,
) -> float:
    """Largest error in the probability of any text of `length` tokens after any start token."""
    bursts = tree_round_laws(verify, target, claimed, enumerate_trees(drafted, shape, draws))
    return max(
        largest_error(decode_law(bursts, start, length), text_law(target, start, length))
        for start in range(len(target))
    )


def _conditional(probs: Sequence[float], tokens: Text) -> list[float]:
    left, found = 1.0, []
    for token in tokens:
        found.append(probs[token] / max(left, 1e-300))
        left -= probs[token]
    return found


def _keep_thresholds(run: Callable, walks: list[_Walk], step: int, width: int) -> list[float]:
    """The u below which each walk's next sibling is kept."""
    rows = torch.tensor([walk.row for walk in walks])
    columns = torch.tensor([walk.siblings[0] for walk in walks])
    uniforms = torch.stack([_padded(walk.uniforms, width + 1) for walk in walks])

    def keeps(uniform: Tensor) -> Tensor:
        uniforms[:, step] = uniform
        return (run(rows, uniforms)[0] == columns[:, None]).any(1)

    return bisect(keeps, len(walks)).tolist()


def _branches(walk: _Walk, keep: float, children: Callable) -> list[_Walk]:
    column, *others = walk.siblings
    below, above = [*walk.uniforms, keep / 2], [*walk.uniforms, (1.0 + keep) / 2]
    down = children(walk.row, column)
    return [
        _Walk(walk.row, column, down, (*walk.kept, column), below, walk.mass * keep),
        _Walk(walk.row, walk.node, others, walk.kept, above, walk.mass * (1.0 - keep)),
    ]


def _padded(uniforms: list[float], width: int) -> Tensor:
    return torch.tensor([*uniforms, *[0.5] * (width - len(uniforms))], dtype=torch.float64)
