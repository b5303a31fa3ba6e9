"""Training-time test: an EAGLE-3 layer run over a text as it runs while drafting.

Step 1 reads the target's states at every position. Step s reads, at position p, what step s - 1 gave
at p - 1, as the s-th token of a draft that began at p - s + 1. It sees the entries that the target's
states made, up to where that draft began, and behind them the draft's own: entry r of the draft is
the one that step r made at p - s + r. So the mask is one causal block, shorter by s - 1, and a
diagonal for each later step.

Source: Li et al. 2025 (EAGLE-3), arXiv:2503.01840, section 3.2.

Shapes: B rows, S tokens, E = S - 1 entries, H heads, F width of the recorded states, D hidden size.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from specdec_runtime.eagle3_network import Eagle3Decoder


def unrolled(
    decoder: Eagle3Decoder, token_ids: Tensor, features: Tensor, steps: int
) -> Iterator[Tensor]:
    """The states in front of the head, step by step: [B, E, D]; entry p scores token p + 2.

    Entry p of step s counts from p = s - 1 on; those before have no draft that they belong to.

    Args:
        token_ids: [B, S], right-padded.
        features: [B, S, F] the target's states at these tokens.
    """
    layer = decoder.layer
    embeddings = decoder.embed_tokens(token_ids[:, 1:])
    places = torch.arange(embeddings.shape[1], device=token_ids.device)
    rotary = decoder.rotary_emb(embeddings, position_ids=places[None])
    entering = decoder.fuse(features[:, :-1].to(decoder.fc.weight.dtype))
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for step in range(steps):
        query, key, value = _heads(layer.self_attn, layer.read(entering, embeddings), rotary)
        keys.append(key)
        values.append(value)
        attended = F.scaled_dot_product_attention(
            query,
            torch.cat(keys, dim=2),
            torch.cat(values, dim=2),
            attn_mask=step_mask(len(places), step).to(query.device),
        )
        attended = layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        residual = layer.finish(entering + attended)
        yield decoder.norm(residual)
        entering = F.pad(decoder.handed_on(residual)[:, :-1], (0, 0, 1, 0))


def step_mask(num_entries: int, step: int) -> Tensor:
    """[E, (step + 1) E] bool: what each entry of a step (from 0) sees of each step's entries."""
    behind = torch.arange(num_entries)[:, None] - torch.arange(num_entries)
    blocks = [behind >= step]
    blocks += [behind == step - earlier for earlier in range(1, step + 1)]
    return torch.cat(blocks, dim=1)


def _heads(
    attention: LlamaAttention, read: Tensor, rotary: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys (both rotated) and values, each [B, H, E, head_dim]."""
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (
        part(read).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for part in parts
    )
    query, key = apply_rotary_pos_emb(query, key, *rotary)
    return query, key, value
