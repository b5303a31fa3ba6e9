"""A parallel drafter over a text, as it runs while drafting: a block at every position.

The block that begins at position P holds the token there and masks behind it. Its row at place k
stands at position P + k and scores the token behind; it sees the target's states in front of P, the
block's token and the masks up to itself. Nothing of what the target makes at P or later is seen: the
token at P is pending while drafting. With one layer the keys and values of a block depend on its
token alone, so that all blocks of a text share them.

Shapes: B rows, S tokens, N chosen places, H heads, E head size, F width of the recorded states, D
hidden size.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, rotate_half

from specdec_runtime.parallel_network import ParallelNetwork


class _Heads(NamedTuple):
    """What attention makes of some inputs; before the rotation. Each [..., H, E]."""

    query: Tensor
    key: Tensor
    value: Tensor


def block_states(
    network: ParallelNetwork,
    token_ids: Tensor,
    features: Tensor,
    rows: Tensor,
    places: Tensor,
    size: int,
    *,
    fixed_heads: int = 0,
) -> Iterator[Tensor]:
    """[N, D] in front of the head, for k = 0 .. size - 1: the row at place k of the block that begins
    k positions in front of each chosen place.

    Args:
        token_ids: [B, S], right-padded.
        features: [B, S, F] the target's states at these tokens.
        rows, places: [N] of the batch; each place at least size - 1.
        fixed_heads: the first heads, whose queries and keys get no gradient.
    """
    layer, attention = network.layer, network.layer.self_attn
    fixed = fixed_heads * attention.head_dim
    embeddings = network.model.embed_tokens(token_ids)
    states = network.fuse(features.to(network.fc.weight.dtype))
    context = _heads(attention, layer.input_layernorm(states), fixed)
    tokens = _heads(attention, layer.input_layernorm(embeddings), fixed)
    masks = _heads(attention, layer.input_layernorm(network.mask_embedding), fixed)
    span = torch.arange(token_ids.shape[1], device=token_ids.device)
    rotary = tuple(part[0] for part in network.model.rotary_emb(embeddings, span[None]))
    for k in range(size):
        attended = _attended(k, context, tokens, masks, rotary, attention.scaling)
        entering = network.mask_embedding if k else embeddings[rows, places]
        residual = entering + attention.o_proj(attended[rows, places])
        residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
        yield network.model.norm(residual)


def _attended(
    k: int,
    context: _Heads,
    tokens: _Heads,
    masks: _Heads,
    rotary: tuple[Tensor, ...],
    scaling: float,
) -> Tensor:
    """[B, S, H * E] of the row at place k that stands at each position; none before position k."""
    batch, width = context.key.shape[:2]
    own = masks.query.expand(batch, width, -1, -1) if k else tokens.query
    query = _rotated(own, rotary)
    to_states = torch.einsum("bphe,bjhe->bhpj", query, _rotated(context.key, rotary))
    span = torch.arange(width, device=query.device)
    to_states = to_states.masked_fill(span[:, None] - span <= k, float("-inf"))
    key, value = _rotated(tokens.key, rotary).roll(k, 1), tokens.value.roll(k, 1)
    to_token = (query * key).sum(-1).transpose(1, 2)[..., None]  # [B, H, S, 1]
    parts = [to_states, to_token]
    if k:  # only distances count, so any k positions in a row will do
        places = tuple(part[: k + 1] for part in rotary)
        last = _rotated(masks.query.expand(k + 1, -1, -1), places)[-1]
        keys = _rotated(masks.key.expand(k + 1, -1, -1), places)[1:]
        to_masks = torch.einsum("he,ihe->hi", last, keys)
        parts.append(to_masks[None, :, None].expand(batch, -1, width, -1))
    weights = (torch.cat(parts, dim=-1) * scaling).float().softmax(-1).to(value.dtype)
    on_states, on_token, on_masks = weights.split([width, 1, k], dim=-1)
    summed = torch.einsum("bhpj,bjhe->bphe", on_states, context.value)
    summed = summed + on_token.transpose(1, 2) * value
    summed = summed + on_masks.sum(-1, keepdim=True).transpose(1, 2) * masks.value
    return summed.flatten(2)


def _heads(attention: Qwen3Attention, read: Tensor, fixed: int) -> _Heads:
    """Of inputs [..., D]; the first `fixed` rows of what makes queries and keys get no gradient."""

    def product(part: nn.Linear, fixed: int = 0) -> Tensor:
        weight = torch.cat([part.weight[:fixed].detach(), part.weight[fixed:]])
        return F.linear(read, weight).unflatten(-1, (-1, attention.head_dim))

    return _Heads(
        attention.q_norm(product(attention.q_proj, fixed)),
        attention.k_norm(product(attention.k_proj, fixed)),
        product(attention.v_proj),
    )


def _rotated(heads: Tensor, rotary: tuple[Tensor, ...]) -> Tensor:
    """[..., S, H, E] turned by the positions 0 .. S - 1."""
    cosine, sine = (part[:, None] for part in rotary)
    return heads * cosine + rotate_half(heads) * sine
