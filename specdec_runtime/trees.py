"""Token trees: several continuations verified in one pass of the target.

A tree hangs below the pending token. Siblings are drawn without replacement from one draft
distribution, so that child j is drawn from it with the earlier siblings struck out and the rest
renormalised: its exact conditional q. Verification walks down from the root and gives each
sibling in turn the speculative test against what its elder siblings left over of the target
(Sequoia, arXiv:2402.12374). Growing trees is in tree_growth.py.

Shapes: b rows, N nodes (the largest tree), V vocabulary. Columns 0..N-1 of a tree are its nodes,
parents in front of children and siblings in the order drawn; tensors with N + 1 columns have
the pending token first, then the nodes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_runtime.noise import draw_by_inversion


class DraftTree(NamedTuple):
    """Token trees of a batch, ragged by `num_nodes`; columns past it are padding."""

    token_ids: Tensor  # [b, N] int64
    parents: Tensor  # [b, N] int64: column of the parent, -1 for children of the pending token
    num_nodes: Tensor  # [b] int64


class TreeVerification(NamedTuple):
    """What one round keeps: a path from the root, and the token after it.

    num_accepted: [b] int64, length of the path.
    next_token_ids: [b] int64, the recovered token, or the bonus token after a leaf.
    path: [b, N] int64, columns of the kept nodes from the root down; -1 past `num_accepted`.
    """

    num_accepted: Tensor
    next_token_ids: Tensor
    path: Tensor


class Siblings(NamedTuple):
    """Children drawn for some nodes: token_ids [n, m] int64, and the conditional probs [n, m].

    Where a distribution has fewer than m tokens, the rest is -1 with probability 0.
    """

    token_ids: Tensor
    probs: Tensor


def pack_trees(token_ids: list[list[int]], parents: list[list[int]]) -> DraftTree:
    """Trees of different sizes as one padded batch."""
    width = max(map(len, token_ids), default=0)
    num_nodes = torch.tensor([len(row) for row in token_ids], dtype=torch.int64)
    return DraftTree(_padded(token_ids, width, 0), _padded(parents, width, -1), num_nodes)


def ancestor_mask(tree: DraftTree) -> Tensor:
    """[b, N + 1, N + 1] bool: which of root and nodes each sees: its ancestors and itself."""
    num_rows, num_nodes = tree.parents.shape
    mask = torch.eye(num_nodes + 1, dtype=torch.bool, device=tree.parents.device)
    mask = mask.repeat(num_rows, 1, 1)
    row = torch.arange(num_rows, device=mask.device)
    for column in range(num_nodes):
        mask[:, column + 1] |= mask[row, tree.parents[:, column] + 1]
    return mask


def depths(tree: DraftTree) -> Tensor:
    """[b, N + 1] int64: steps below the pending token, which is at 0."""
    return ancestor_mask(tree).sum(-1) - 1


def draw_siblings(probs: Tensor, uniforms: Tensor) -> Siblings:
    """Draw m distinct children from each distribution, one after another.

    Args:
        probs: [n, V].
        uniforms: [n, m] float64 in [0, 1).
    """
    rest = probs.clone()
    tokens, conditional = [], []
    for uniform in uniforms.unbind(1):
        mass = rest.sum(-1)
        token = draw_by_inversion(rest, uniform).clamp_max(probs.shape[1] - 1)[:, None]
        conditional.append(rest.gather(1, token).squeeze(1) / mass.clamp_min(_tiny(mass)))
        tokens.append(torch.where(mass > 0.0, token.squeeze(1), -1))
        rest.scatter_(1, token, 0.0)
    return Siblings(torch.stack(tokens, 1), torch.stack(conditional, 1))


def likeliest_siblings(probs: Tensor, count: int) -> Siblings:
    """The `count` likeliest tokens of each distribution, most likely first; nothing is drawn.

    Verify such children as certain (q one-hot), or against a greedy target.
    """
    missing = max(0, count - probs.shape[1])
    top, tokens = torch.nn.functional.pad(probs, (0, missing)).topk(count, dim=-1)
    left = probs.sum(-1, keepdim=True) - (top.cumsum(-1) - top)  # mass before each was taken
    return Siblings(
        torch.where(top > 0.0, tokens, -1), top / left.clamp_min(_tiny(left)).maximum(top)
    )


def verify_tree(
    tree: DraftTree,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    uniforms: Tensor,
) -> TreeVerification:
    """Walk down from the root, testing siblings in turn, until none of them is kept.

    At a node with target p and draft q, child x is kept with probability min(1, p(x) / q(x)).
    If it is refused, p becomes norm(max(0, p - q)), q loses x and is renormalised, and the next
    sibling is tested. When none is left, the next token is drawn from p.

    Args:
        tree: siblings drawn without replacement, in this order.
        draft_probs: [b, N + 1, V], what the children of root and nodes were drawn from (rows of
            leaves are not read); zeros where children were chosen without chance (q one-hot for
            each in turn), None where all were.
        target_probs: [b, N + 1, V], what follows root and nodes.
        uniforms: [b, N + 1] in [0, 1), independent of the noise the tree was drawn with.
    """
    num_rows, num_nodes = tree.token_ids.shape
    first_child, next_sibling = _links(tree)
    row = torch.arange(num_rows, device=tree.token_ids.device)
    target = target_probs[:, 0]
    draft_probs = torch.zeros_like(target_probs) if draft_probs is None else draft_probs
    draft = draft_probs[:, 0]
    candidate = first_child[:, 0]  # columns, -1: none left
    path = torch.full_like(tree.token_ids, -1)
    num_accepted = torch.zeros_like(candidate)
    for step in range(num_nodes):
        tested = candidate >= 0
        if not tested.any():  # one look at the device a step; trees are shallow
            break
        node = candidate.clamp_min(0)
        token = tree.token_ids[row, node][:, None]
        chosen = draft.sum(-1, keepdim=True) == 0.0
        q = torch.where(chosen, 1.0, draft.gather(1, token))
        kept = tested & (uniforms[:, step : step + 1] * q < target.gather(1, token)).squeeze(1)
        path[row[kept], num_accepted[kept]] = node[kept]
        num_accepted += kept
        refused_target, refused_draft = _refuse(target, draft, token, chosen)
        kept_, tested_ = kept[:, None], tested[:, None]
        target = torch.where(
            kept_, target_probs[row, node + 1], torch.where(tested_, refused_target, target)
        )
        draft = torch.where(kept_, draft_probs[row, node + 1], refused_draft)
        onward = torch.where(kept, first_child[row, node + 1], next_sibling[row, node])
        candidate = torch.where(tested, onward, -1)
    return TreeVerification(num_accepted, draw_by_inversion(target, uniforms[:, -1]), path)


def _refuse(target: Tensor, draft: Tensor, token: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Target and draft after `token` [b, 1] was refused, both normalised: [b, V] each.

    Args:
        chosen: [b, 1] bool, where the token was not drawn but chosen.
    """
    draft_left = draft.scatter(1, token, 0.0)
    target_left = torch.where(
        chosen, target.scatter(1, token, 0.0), (target - draft).clamp_min(0.0)
    )
    mass = target_left.sum(-1, keepdim=True)
    # No mass: target and draft agree, nothing is refused but by rounding.
    target_left = torch.where(mass > 0.0, target_left / mass.clamp_min(_tiny(mass)), target)
    draft_mass = draft_left.sum(-1, keepdim=True)
    return target_left, draft_left / draft_mass.clamp_min(_tiny(draft_mass))


def _links(tree: DraftTree) -> tuple[Tensor, Tensor]:
    """First child of root and nodes [b, N + 1] and next sibling of nodes [b, N]; -1: none."""
    num_nodes = tree.parents.shape[1]
    column = torch.arange(num_nodes, device=tree.parents.device)
    real = column < tree.num_nodes[:, None]  # [b, N]
    parents = torch.where(real, tree.parents, -2)
    owner = torch.arange(-1, num_nodes, device=parents.device)
    is_child = owner[:, None] == parents[:, None, :]  # [b, N + 1, N]
    first_child = _first(is_child)
    younger = (
        (parents[:, :, None] == parents[:, None, :]) & (column[:, None] < column) & real[:, None]
    )
    return first_child, _first(younger)


def _padded(rows: list[list[int]], width: int, filler: int) -> Tensor:
    full = [[*row, *[filler] * (width - len(row))] for row in rows]
    return torch.tensor(full, dtype=torch.int64).view(len(rows), width)


def _first(mask: Tensor) -> Tensor:
    """Index of the first True along the last dimension; -1: none."""
    if not mask.shape[-1]:
        return mask.new_full(mask.shape[:-1], -1, dtype=torch.int64)
    first = mask.long().argmax(-1)
    return torch.where(mask.any(-1), first, -1)


def _tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny
