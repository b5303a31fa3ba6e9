"""Drafting token trees with a causal model: one pass a level, every pass over the whole tree.

A pass feeds all nodes so far behind the committed text, each seeing its own ancestors only, and
the cache then forgets them: what a few nodes more cost in a pass is less than what keeping
branches apart in the cache would. Which places get a node is the tree's own affair and decided
before its token is drawn (tree_growth.py).

Shapes: b rows, N nodes (the largest tree), n nodes whose children are drawn, V the target's real vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_runtime.draft import Draft, no_draft
from specdec_runtime.sampling import Sampler
from specdec_runtime.tree_growth import ROOT, GrowingTree, TreeShape
from specdec_runtime.trees import (
    DraftTree,
    Siblings,
    ancestor_mask,
    draw_siblings,
    likeliest_siblings,
    pack_trees,
)

# (members, trees) -> [n, N + 1, V] logits after the pending token and each node of the trees.
TreeLogits = Callable[[list[int], DraftTree], Tensor]


def draft_trees(
    rows: list[int],
    committed: list[list[int]],
    limits: list[int],
    *,
    shape: TreeShape,
    sampler: Sampler,
    tree_logits: TreeLogits,
    temperature: float | None = None,
) -> Draft:
    """Grow one tree a row, at most limits[i] levels deep.

    Rows that sample draw siblings without replacement from their exact distribution; greedy rows
    take the likeliest ones.
    """
    trees = [shape.begin(limit) if limit > 0 else None for limit in limits]
    probs: dict[tuple[int, int], Tensor] = {}  # (member, node or ROOT) -> [V]
    while True:
        wanted = {
            member: parents
            for member, tree in enumerate(trees)
            if tree is not None and (parents := tree.next_parents())
        }
        if not wanted:
            break
        members = list(wanted)
        logits = tree_logits(members, _packed([trees[member] for member in members]))
        for place, member in enumerate(members):
            tree, parents = trees[member], wanted[member]
            assert tree is not None
            scores = logits[place, [parent + 1 for parent in parents]]
            history = committed[member] if sampler.needs_history else None
            contexts = None if history is None else [history + path(tree, p) for p in parents]
            drawn_from, siblings = _children(
                sampler, scores, rows[member], contexts, shape.num_siblings, temperature
            )
            for i, parent in enumerate(parents):
                probs[member, parent] = drawn_from[i]
                tree.offer(parent, siblings.token_ids[i].tolist(), siblings.probs[i].tolist())
    return _as_draft(trees, probs, len(rows), certain=sampler.all_greedy)


def path(tree: GrowingTree, node: int) -> list[int]:
    """Tokens from the root down to `node`; [] for ROOT."""
    tokens = []
    while node != ROOT:
        tokens.append(tree.token_ids[node])
        node = tree.parents[node]
    return tokens[::-1]


class TreeInputs(NamedTuple):
    """One pass over the pending token and all nodes of each row's tree."""

    token_ids: Tensor  # [b, N + 1] int64
    num_new: Tensor  # [b] int64
    depths: Tensor  # [b, N + 1] int64: positions relative to the pending token's
    visible: Tensor  # [b, N + 1, N + 1] bool


def tree_inputs(pending: list[int], tree: DraftTree) -> TreeInputs:
    """What a model is fed to score every node as the end of its own path."""
    device = tree.token_ids.device
    roots = torch.tensor(pending, device=device)[:, None]
    visible = ancestor_mask(tree)
    return TreeInputs(
        torch.cat([roots, tree.token_ids], dim=1),
        tree.num_nodes.cpu() + 1,
        visible.sum(-1) - 1,
        visible,
    )


def _children(
    sampler: Sampler,
    logits: Tensor,
    row: int,
    contexts: list[list[int]] | None,
    count: int,
    temperature: float | None,
) -> tuple[Tensor, Siblings]:
    """Children of some nodes of one row, and the [n, V] distributions they were drawn from."""
    if bool(sampler.greedy[row]):
        soft = logits[:, : sampler.vocab_size].float().softmax(-1)
        return soft, likeliest_siblings(soft, count)
    rows = [row] * len(logits)
    probs = sampler.probs(logits, rows, contexts, temperature=temperature)
    uniforms = sampler.draft_uniforms([row], len(logits) * count).view(len(logits), count)
    return probs, draw_siblings(probs, uniforms.to(probs.device))


def _packed(trees: list[GrowingTree | None]) -> DraftTree:
    return pack_trees(
        [tree.token_ids if tree else [] for tree in trees],
        [tree.parents if tree else [] for tree in trees],
    )


def _as_draft(
    trees: list[GrowingTree | None],
    probs: dict[tuple[int, int], Tensor],
    num_rows: int,
    *,
    certain: bool,
) -> Draft:
    packed = _packed(trees)
    if not packed.token_ids.shape[1]:
        return no_draft(num_rows)
    stacked = None
    if not certain:
        like = next(iter(probs.values()))
        stacked = like.new_zeros(num_rows, packed.token_ids.shape[1] + 1, len(like))
        for (member, node), distribution in probs.items():
            stacked[member, node + 1] = distribution
    return Draft(packed.token_ids, packed.num_nodes, stacked, tree=packed)
