"""Verification: which drafted tokens the target keeps, and the token that follows them.

Pure functions over a ragged batch; their randomness is an argument. Whatever distribution the
drafts were drawn from, the kept tokens and the next one follow the target exactly, provided that
`draft_probs` are the very distributions drawn from and that whether a position was drafted at
all was decided without looking at its token (see draft_length.py).

- `verify_greedy`: the longest prefix that equals the target's own choices, of one row on the host.
- `verify_speculative`: token by token. Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1
  (p = target, q = draft, as below).
- `verify_block`: the whole chain at once, never fewer tokens in expectation. Sun et al. 2024,
  arXiv:2403.10444.

A greedy row may share a batch with sampled ones: its target distribution is one-hot, and both
sampling rules then reduce to the greedy one.

Shapes: B rows, K drafted positions (the longest row's), V vocabulary. Positions at or past a
row's `num_drafted` are padding: any id in the vocabulary, any finite probabilities.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_runtime.noise import draw_by_inversion


class Verification(NamedTuple):
    """What one round keeps.

    num_accepted: [B] int64, drafted tokens kept; the next token is not among them.
    next_token_ids: [B] int64, the recovered token, or the bonus token where all were kept.
    """

    num_accepted: Tensor
    next_token_ids: Tensor


def verify_greedy(draft_ids: Sequence[int], target_ids: Sequence[int]) -> int:
    """How many drafted tokens of a row are kept: up to the first that is not the target's choice.

    Args:
        draft_ids: the row's drafted tokens.
        target_ids: the target's choice at every drafted position and after; the token that follows
            n kept ones is target_ids[n].
    """
    for position, token in enumerate(draft_ids):
        if token != target_ids[position]:
            return position
    return len(draft_ids)


def verify_speculative(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    num_drafted: Tensor,
    uniforms: Tensor,
) -> Verification:
    """Keep each drafted token x with probability min(1, p(x) / q(x)), up to the first refusal.

    A refused token is replaced by a draw from norm(max(0, p - q)).

    Args:
        draft_ids: [B, K] int64, drawn from `draft_probs`.
        draft_probs: [B, K, V], or None where every drafted token was certain (q one-hot).
        target_probs: [B, K + 1, V], after the same processing as the draft's.
        num_drafted: [B] int64, at most K.
        uniforms: [B, K + 1] in [0, 1), independent of the noise the drafts were drawn with.

    Raises:
        ValueError: the shapes do not agree on B, K and V.
    """
    _check_shapes(draft_ids, draft_probs, target_probs, uniforms)
    p, q = _drafted_token_probs(draft_ids, draft_probs, target_probs)
    # u < p / q without the division: q may be 0 in padding.
    kept = (uniforms[:, :-1] * q < p) & _is_drafted(draft_ids, num_drafted)
    num_accepted = kept.cumprod(dim=1).sum(dim=1)
    scale = torch.ones_like(uniforms[:, 0])
    residual = _residual(draft_ids, draft_probs, target_probs, num_drafted, num_accepted, scale)
    return Verification(num_accepted, draw_by_inversion(residual, uniforms[:, -1]))


def verify_block(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    num_drafted: Tensor,
    uniforms: Tensor,
) -> Verification:
    """Keep the longest prefix that passes its own test, however the shorter ones fared.

    With P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)), P_0 = 1, prefix i passes with probability
    h_i = Z_i / (Z_i + 1 - P_i), Z_i = sum_x max(0, P_i p_{i+1}(x) - q_{i+1}(x)); the whole draft
    passes with probability P_K. After a prefix of length i < K comes a draw from
    norm(max(0, P_i p_{i+1} - q_{i+1})). Arguments and errors as `verify_speculative`.
    """
    _check_shapes(draft_ids, draft_probs, target_probs, uniforms)
    prefix_weight = _prefix_weights(*_drafted_token_probs(draft_ids, draft_probs, target_probs))
    passes = _prefix_pass_probs(draft_ids, draft_probs, target_probs, num_drafted, prefix_weight)
    position = torch.arange(1, draft_ids.shape[1] + 1, device=draft_ids.device)
    num_accepted = (
        ((uniforms[:, :-1] < passes) * position).amax(1) if len(position) else num_drafted
    )
    scale = torch.cat([torch.ones_like(uniforms[:, :1]), prefix_weight], dim=1)
    scale = scale.gather(1, num_accepted[:, None]).squeeze(1)  # P of the kept prefix
    residual = _residual(draft_ids, draft_probs, target_probs, num_drafted, num_accepted, scale)
    return Verification(num_accepted, draw_by_inversion(residual, uniforms[:, -1]))


def _prefix_weights(p: Tensor, q: Tensor) -> Tensor:
    """P_1..P_K of block verification: [B, K] float64.

    Unrolled, log P_i = S_i - max(0, S_1, ..., S_i) with S the running sum of log p/q: long
    products neither underflow nor need a loop.
    """
    tiny = torch.finfo(torch.float64).tiny
    log_ratio = p.double().log() - q.double().clamp_min(tiny).log()
    running = log_ratio.cumsum(dim=1)
    if not running.shape[1]:
        return running
    return (running - running.cummax(dim=1).values.clamp_min(0.0)).exp()


def _prefix_pass_probs(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    num_drafted: Tensor,
    prefix_weight: Tensor,
) -> Tensor:
    """h_1..h_K: [B, K] float64; 0 for padding, P_i at a row's last drafted position."""
    num_positions = draft_ids.shape[1]
    if draft_probs is None:
        # A one-hot q leaves Z_i = P_i (1 - p(x_{i+1})).
        after = target_probs[:, 1:num_positions].gather(2, draft_ids[:, 1:, None]).squeeze(2)
        mass = prefix_weight[:, :-1] * (1.0 - after.double())
    else:
        weight = prefix_weight[:, :-1, None].to(target_probs.dtype)
        excess = target_probs[:, 1:num_positions] * weight - draft_probs[:, 1:]
        mass = excess.clamp_min_(0.0).sum(-1, dtype=torch.float64)
    mass = torch.nn.functional.pad(mass, (0, num_positions - mass.shape[1]))
    reach = mass + 1.0 - prefix_weight
    # reach == 0 only where P_i = 1 and p = q afterwards: the longer prefix passes for certain.
    inner = torch.where(reach > 0.0, mass / reach, 1.0)
    last = torch.arange(1, num_positions + 1, device=draft_ids.device) == num_drafted[:, None]
    passes = torch.where(last, prefix_weight, inner)
    return torch.where(_is_drafted(draft_ids, num_drafted), passes, 0.0)


def _residual(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    num_drafted: Tensor,
    num_accepted: Tensor,
    scale: Tensor,
) -> Tensor:
    """What the next token is drawn from, unnormalised: [B, V].

    max(0, scale * p - q) at the first position that was not kept; p itself where every drafted
    token was kept, or where rounding leaves the difference without mass.
    """
    row = torch.arange(len(num_accepted), device=num_accepted.device)
    target = target_probs[row, num_accepted]  # [B, V]
    if not draft_ids.shape[1]:
        return target
    position = num_accepted.clamp_max(draft_ids.shape[1] - 1)
    if draft_probs is None:
        residual = target.scatter(1, draft_ids[row, position][:, None], 0.0)
    else:
        residual = target * scale[:, None].to(target.dtype) - draft_probs[row, position]
        residual.clamp_min_(0.0)
    refused = (num_accepted < num_drafted) & (residual.sum(-1) > 0.0)
    return torch.where(refused[:, None], residual, target)


def _drafted_token_probs(
    draft_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor
) -> tuple[Tensor, Tensor]:
    """p(x_i) and q(x_i) of every drafted token: [B, K] each."""
    index = draft_ids[:, :, None]
    p = target_probs[:, : draft_ids.shape[1]].gather(2, index).squeeze(2)
    if draft_probs is None:
        return p, torch.ones_like(p)
    return p, draft_probs.gather(2, index).squeeze(2)


def _is_drafted(draft_ids: Tensor, num_drafted: Tensor) -> Tensor:
    """True for real drafted positions, False for padding: [B, K]."""
    return torch.arange(draft_ids.shape[1], device=draft_ids.device) < num_drafted[:, None]


def _check_shapes(
    draft_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, uniforms: Tensor
) -> None:
    num_rows, num_positions = draft_ids.shape
    vocab_size = target_probs.shape[-1]
    expected = {
        "target_probs": (target_probs, (num_rows, num_positions + 1, vocab_size)),
        "uniforms": (uniforms, (num_rows, num_positions + 1)),
    }
    if draft_probs is not None:
        expected["draft_probs"] = (draft_probs, (num_rows, num_positions, vocab_size))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected {shape} for draft_ids of shape "
                f"{tuple(draft_ids.shape)}: process draft and target over one vocabulary"
            )
