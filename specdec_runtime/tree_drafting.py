"""Drafting token trees with a causal model: one pass a level, every pass over the whole tree.

(Lookup draws nothing and needs no pass: `certain_trees`.) A pass feeds all nodes so far behind the committed text, each seeing its own ancestors only, and
the cache then forgets them: what a few nodes more cost in a pass is less than what keeping
branches apart in the cache would. Which places get a node is the tree's own affair and decided
before its token is drawn (tree_growth.py).

Shapes: b rows, N nodes (the largest tree), n nodes whose children are drawn, V the target's real vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_runtime.branches import Branch
from specdec_runtime.draft import Draft, no_draft
from specdec_runtime.model import Cache, CausalModel
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
    take the likeliest ones, and so do all rows at a draft temperature of 0.
    """
    trees = [shape.begin(limit) if limit > 0 else None for limit in limits]
    certain = sampler.all_greedy or temperature == 0.0
    passes: list[_TreePass] = []
    while wanted := _next_parents(trees):
        members = list(wanted)
        logits = tree_logits(members, _packed([trees[member] for member in members]))
        contexts = None
        if sampler.needs_history:
            contexts = [
                committed[member] + path(trees[member], parent)
                for member, parents in wanted.items()
                for parent in parents
            ]
        drawn = _draw_children(wanted, logits, rows, contexts, shape, sampler, temperature)
        token_ids, probs = drawn.siblings.token_ids.tolist(), drawn.siblings.probs.tolist()
        for (member, parent), *children in zip(drawn.parents, token_ids, probs, strict=True):
            tree = trees[member]
            assert tree is not None
            tree.offer(parent, *children)
        passes.append(drawn)
    return _as_draft(trees, [] if certain else passes, len(rows))


def certain_trees(branches: Sequence[Branch], limits: Sequence[int], shape: TreeShape) -> Draft:
    """Grow one tree a row out of what lookup has found, at most limits[i] levels deep."""
    trees = [shape.begin(limit) if limit > 0 else None for limit in limits]
    for tree, root in zip(trees, branches, strict=True):
        while tree is not None and (parents := tree.next_parents()):
            for parent in parents:
                tree.offer(parent, *root.at(path(tree, parent)).likeliest(shape.num_siblings))
    return _as_draft(trees, [], len(trees))


class _TreePass(NamedTuple):
    """Children drawn in one draft pass."""

    parents: list[tuple[int, int]]  # [n] (member, node or ROOT)
    probs: Tensor  # [n, V] what they were drawn from
    siblings: Siblings


def _next_parents(trees: list[GrowingTree | None]) -> dict[int, list[int]]:
    """Members whose trees go on growing, with the nodes whose children are drawn next."""
    grown = {member: tree.next_parents() for member, tree in enumerate(trees) if tree is not None}
    return {member: parents for member, parents in grown.items() if parents}


def _draw_children(
    wanted: dict[int, list[int]],
    logits: Tensor,
    rows: list[int],
    contexts: list[list[int]] | None,
    shape: TreeShape,
    sampler: Sampler,
    temperature: float | None,
) -> _TreePass:
    """Children of all `wanted` nodes at once, from [m, N + 1, V] logits of their members."""
    parents = [(member, node) for member, nodes in wanted.items() for node in nodes]
    places = [place for place, nodes in enumerate(wanted.values()) for _ in nodes]
    scores = logits[places, [node + 1 for _, node in parents]]  # [n, V]
    owners = [rows[member] for member, _ in parents]
    soft = sampler.soft_probs(scores, owners, contexts)
    likeliest = likeliest_siblings(soft, shape.num_siblings)
    is_certain = [temperature == 0.0 or sampler.temperatures[row] == 0.0 for row in owners]
    if all(is_certain):
        return _TreePass(parents, soft, likeliest)
    probs = sampler.probs(scores, owners, contexts, temperature=temperature)
    # Every pass takes the same amount of noise from a row's stream, whatever its tree draws.
    noise = sampler.draft_uniforms(
        [rows[member] for member in wanted], shape.num_nodes * shape.num_siblings
    ).view(len(wanted), shape.num_nodes, shape.num_siblings)
    order = [i for nodes in wanted.values() for i in range(len(nodes))]
    drawn = draw_siblings(probs, noise[places, order].to(probs.device))
    chosen = torch.tensor(is_certain, device=probs.device)[:, None]
    siblings = Siblings(
        torch.where(chosen, likeliest.token_ids, drawn.token_ids),
        torch.where(chosen, likeliest.probs, drawn.probs),
    )
    return _TreePass(parents, torch.where(chosen, soft, probs), siblings)


def path(tree: GrowingTree | None, node: int) -> list[int]:
    """Tokens from the root down to `node`; [] for ROOT."""
    assert tree is not None
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
    num_new = tree.num_nodes + 1
    is_padding = torch.arange(visible.shape[1], device=device) >= num_new[:, None]
    return TreeInputs(
        torch.cat([roots, tree.token_ids], dim=1),
        num_new.cpu(),
        (visible.sum(-1) - 1).masked_fill(is_padding, 0),  # padding is not a level of the tree
        visible,
    )


def score_trees(
    model: CausalModel, cache: Cache, rows: list[int], pending: list[int], tree: DraftTree
) -> Tensor:
    """[b, N + 1, columns] logits after the pending token and every node; the cache forgets both."""
    inputs = tree_inputs(pending, tree)
    starts = cache.lengths[rows]
    output = model.forward(
        inputs.token_ids,
        cache,
        num_new=inputs.num_new,
        rows=rows,
        positions=starts[:, None] + inputs.depths.cpu(),
        visible=inputs.visible,
    )
    cache.truncate(starts, rows)
    assert output.logits is not None
    return output.logits


def _packed(trees: list[GrowingTree | None]) -> DraftTree:
    return pack_trees(
        [tree.token_ids if tree else [] for tree in trees],
        [tree.parents if tree else [] for tree in trees],
    )


def _as_draft(trees: list[GrowingTree | None], passes: list[_TreePass], num_rows: int) -> Draft:
    """The trees as one draft; without `passes` their children count as certain."""
    packed = _packed(trees)
    if not packed.token_ids.shape[1]:
        return no_draft(num_rows)
    stacked = None
    if passes:
        like = passes[0].probs
        stacked = like.new_zeros(num_rows, packed.token_ids.shape[1] + 1, like.shape[1])
        for one in passes:
            members, nodes = zip(*one.parents, strict=True)
            stacked[list(members), [node + 1 for node in nodes]] = one.probs
    return Draft(packed.token_ids, packed.num_nodes, stacked, tree=packed)
