"""Attention heads that look at the nearest entry of one sort, set up by hand.

With normed queries and keys a head whose key projection is a rank-one map u (a . x) has exactly two
keys, u and -u, whatever it reads: the sign of a . x is the sort of the entry. With the queries
v (b . x), what is left of a score is the sign and the distance, through the rotation of positions:

    score(distance) = +- S sum_i p_i cos(theta_i distance + phi_i)      sum of p = 1

So p and phi shape attention over distances. `nearest_first` finds those that look at the nearest
entry of the sort, however many others lie behind, and `separating` finds a.

Rotation: Su et al. 2021 (RoPE), arXiv:2104.09864.

Shapes: E head size, E / 2 frequencies, K places of a block, D hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

_STRENGTH = 64.0  # S: 30 to 60 leave a few percent of attention to the second nearest
_STEPS = 300
_STEP_SIZE = 0.02


class Kernel(NamedTuple):
    """What a head makes of distances, as its query and its key in front of the rotation; [E] each."""

    query: Tensor
    key: Tensor


def nearest_first(inverse_frequencies: Tensor, places: int, *, reach: int) -> Kernel:
    """Looks at the nearest entry of the sort, from a block of `places` rows.

    The row at place k has the states from distance k + 1 on, and the block's own rows at 0 .. k; both
    are to be looked at nearest first, and the other sort not at all.

    Args:
        reach: distances that are considered; behind, a score may come back.
    """
    count = len(inverse_frequencies)
    angles = torch.arange(reach + places)[:, None] * inverse_frequencies.cpu()
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    start = 1 / torch.arange(1, count + 1)
    with torch.enable_grad():
        shape = torch.cat([start, torch.full((count,), 0.01)]).requires_grad_()
        optimizer = torch.optim.Adam([shape], lr=_STEP_SIZE)
        for _ in range(_STEPS):
            scores = _STRENGTH * (table @ shape) / shape.view(2, count).norm(dim=0).sum()
            ahead = torch.stack([scores[k + 1 : k + 1 + reach] for k in range(places)])
            own = torch.cat([scores[: places + 1], -scores[1:]])
            missed = -ahead.log_softmax(1)[:, 0].sum() - own.log_softmax(0)[0]
            optimizer.zero_grad()
            missed.backward()
            optimizer.step()
    return _kernel(*shape.detach().view(2, count))


def separating(positive: Tensor, negative: Tensor) -> Tensor:
    """[D] a direction whose product is positive on the first [N, D] and negative on the second; on
    most of them, where they can not be told apart: a logistic regression without a constant."""
    rows = torch.cat([positive, -negative])
    shares = torch.cat([torch.full((len(part),), 0.5 / len(part)) for part in (positive, negative)])
    with torch.enable_grad():
        direction = torch.zeros(rows.shape[1], requires_grad=True)
        optimizer = torch.optim.Adam([direction], lr=_STEP_SIZE)
        for _ in range(_STEPS):
            missed = torch.nn.functional.softplus(-(rows @ direction)) @ shares
            optimizer.zero_grad()
            missed.backward()
            optimizer.step()
    return direction.detach()


def _kernel(cosines: Tensor, sines: Tensor) -> Kernel:
    """Query and key whose score is sum of cosines * cos(theta distance) + sines * sin(theta distance)."""
    angles = torch.atan2(-sines, cosines)
    sizes = torch.hypot(cosines, sines).sqrt()
    query = torch.cat([sizes * angles.cos(), sizes * angles.sin()])
    return Kernel(query, torch.cat([sizes, torch.zeros_like(sizes)]))


@torch.no_grad()
def set_strength(attention: Qwen3Attention) -> None:
    """Scales normed queries and keys so that S is what the kernels were made for."""
    size = (_STRENGTH * attention.head_dim**-0.5) ** 0.5
    attention.q_norm.weight.fill_(size)
    attention.k_norm.weight.fill_(size)


@torch.no_grad()
def set_heads(
    attention: Qwen3Attention, heads: range, kernel: Kernel, *, seeks: Tensor, found: Tensor
) -> None:
    """Gives some heads their queries and keys.

    Args:
        seeks: [D] positive on what looks at the entries that are `found`, negative on what looks at
            the others.
        found: [D] positive on those entries, negative on all others.
    """
    size = attention.head_dim
    for head in heads:
        rows = slice(head * size, (head + 1) * size)
        attention.q_proj.weight[rows] = torch.outer(kernel.query, seeks)
        attention.k_proj.weight[rows] = torch.outer(kernel.key, found)
