"""Training-time test: an EAGLE-3 layer run over a text as it runs while drafting.

Step 1 reads the target's states at every position. Step s reads, at position p, what step s - 1 gave
at p - 1, as the s-th token of a draft that began at p - s + 1. It sees the entries that the target's
states made, up to where that draft began, and behind them the draft's own: entry r of the draft is
the one that step r made at p - s + r. So the mask is one causal block, shorter by s - 1, and a
diagonal for each later step.

Only keys and values of the first step are needed along the whole text. All else, queries, MLP and the
later steps, runs over the window of it where tokens are scored: that spares the prompts.

Source: Li et al. 2025 (EAGLE-3), arXiv:2503.01840, section 3.2.

Shapes: B rows, S tokens, E = S - 1 entries, W entries of a window, H heads, F width of the recorded
states, D hidden size.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention, rotate_half

from specdec_runtime.eagle3_network import Eagle3Decoder


class Window(NamedTuple):
    """Neighbouring entries of each row, as many of each; those behind a row's end are never read."""

    first: Tensor  # [B] int64
    width: int  # W


def unrolled(
    decoder: Eagle3Decoder, token_ids: Tensor, features: Tensor, steps: int, window: Window
) -> Iterator[Tensor]:
    """The states in front of the head, step by step: [B, W, D]; entry p scores token p + 2.

    Entry j of a window counts at step s (from 1) if j >= s - 1: the draft of those before began in
    front of the window.

    Args:
        token_ids: [B, S], right-padded.
        features: [B, S, F] the target's states at these tokens.
    """
    layer = decoder.layer
    embeddings = decoder.embed_tokens(token_ids[:, 1:])
    num_entries = embeddings.shape[1]
    columns = window.first[:, None] + torch.arange(window.width, device=token_ids.device)
    columns = columns.clamp(max=num_entries - 1)
    places = torch.arange(num_entries, device=token_ids.device)[None]
    fused = decoder.fuse(features[:, :-1].to(decoder.fc.weight.dtype))
    read = layer.read(fused, embeddings)
    rotary = decoder.rotary_emb(embeddings, position_ids=places)
    keys, values = ([heads] for heads in _keys_and_values(layer.self_attn, read, rotary))
    rotary = decoder.rotary_emb(embeddings, position_ids=columns)
    entering, read, embeddings = (_at(of_all, columns) for of_all in (fused, read, embeddings))
    for step in range(steps):
        if step:
            read = layer.read(entering, embeddings)
            key, value = _keys_and_values(layer.self_attn, read, rotary)
            keys.append(key)
            values.append(value)
        attended = F.scaled_dot_product_attention(
            _queries(layer.self_attn, read, rotary),
            torch.cat(keys, dim=2),
            torch.cat(values, dim=2),
            attn_mask=step_mask(columns, num_entries, step)[:, None],
        )
        attended = layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        residual = layer.finish(entering + attended)
        yield decoder.norm(residual)
        entering = F.pad(decoder.handed_on(residual)[:, :-1], (0, 0, 1, 0))


def step_mask(columns: Tensor, num_entries: int, step: int) -> Tensor:
    """[B, W, E + step W] bool: what each entry of a window sees at a step (from 0) of the first
    step's entries, which are along the whole text, and of each later step's.

    Args:
        columns: [B, W] where in the text the window's entries are.
    """
    device, (num_rows, width) = columns.device, columns.shape
    recorded = columns[:, :, None] - torch.arange(num_entries, device=device) >= step
    behind = torch.arange(width, device=device)[:, None] - torch.arange(width, device=device)
    drafted = [behind == step - earlier for earlier in range(1, step + 1)]
    return torch.cat([recorded, *(part.expand(num_rows, -1, -1) for part in drafted)], dim=2)


def _at(states: Tensor, columns: Tensor) -> Tensor:
    """[B, W, D] of [B, E, D]."""
    return states.gather(1, columns[..., None].expand(-1, -1, states.shape[-1]))


def _queries(attention: LlamaAttention, read: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """[B, H, entries, head_dim], rotated."""
    query = attention.q_proj(read).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    return _rotated(query, rotary)


def _keys_and_values(
    attention: LlamaAttention, read: Tensor, rotary: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Keys (rotated) and values, each [B, H, entries, head_dim]."""
    key, value = (
        part(read).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for part in (attention.k_proj, attention.v_proj)
    )
    return _rotated(key, rotary), value


def _rotated(heads: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotary
    return heads * cosine[:, None] + rotate_half(heads) * sine[:, None]
