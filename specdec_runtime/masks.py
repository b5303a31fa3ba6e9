"""Attention masks for rows of different lengths, as one boolean tensor a kind of layer.

Cached tokens sit at slot == position; the Q new tokens of row i sit at slots starts[i] + 0..Q-1.
A new token sees the cached ones in front of it and, of the new ones, those up to itself, or those
that `visible` names (trees). Sliding windows and chunks are masks too: no entry is ever evicted.

Shapes: b rows, Q new tokens, S slots.
"""

import torch
from torch import Tensor


def attention_mask(
    starts: Tensor,
    num_new: int,
    num_slots: int,
    *,
    positions: Tensor | None = None,
    visible: Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """[b, 1, Q, S] bool, True where the new token may look at the slot.

    Args:
        starts: [b] int64, tokens cached in each row before this pass.
        num_new: Q.
        num_slots: S.
        positions: [b, Q] int64 of the new tokens; None = their slots.
        visible: [b, Q, Q] bool; None = causal.
        window: a token sees only positions p with own - window < p.
        chunk: a token sees only positions of its own block of `chunk` positions.
    """
    slots = torch.arange(num_slots, device=starts.device)  # [S]
    own_slots = starts[:, None] + torch.arange(num_new, device=starts.device)  # [b, Q]
    if positions is None and visible is None:
        mask = slots <= own_slots[:, :, None]
        query_positions, key_positions = own_slots, slots[None]
    else:
        # Which new token sits at each slot; clamped, and only used where `is_new`.
        new_index = slots - starts[:, None]  # [b, S]
        is_new = (new_index >= 0) & (new_index < num_new)
        new_index = new_index.clamp(0, num_new - 1)
        query_positions = own_slots if positions is None else positions
        key_positions = torch.where(is_new, query_positions.gather(1, new_index), slots)
        if visible is None:
            mask = slots <= own_slots[:, :, None]
        else:
            columns = new_index[:, None].expand(-1, num_new, -1)
            mask = (slots < starts[:, None])[:, None] | (
                is_new[:, None] & visible.gather(2, columns)
            )
    if window is not None:
        mask = mask & (query_positions[:, :, None] - key_positions[:, None] < window)
    if chunk is not None:
        mask = mask & (query_positions[:, :, None] // chunk == key_positions[:, None] // chunk)
    return mask[:, None]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as what eager attention adds to its scores: 0 or the lowest number of `dtype`."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(
        ~mask, torch.finfo(dtype).min
    )
