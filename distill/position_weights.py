"""How much each position of a draft counts: weights over blocks of drafted positions.

A round keeps the drafted tokens up to the first that the target refuses, so what a position is worth
depends on those before it. The weights say so; they have no gradient of their own and are scaled to
a mean of one, so that a learning rate means the same with and without them.

Every token of a text is the first position of one block, the second of another and so on:
`BlocksOfText` lays a block at every token and puts the weights back onto the text.

Shapes: M blocks, K positions of a block, N loss positions of a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class WeightScheme(Enum):
    """How the positions of a block are weighted."""

    uniform = "uniform"
    decay = "decay"
    first_rejection = "first_rejection"
    d_pace = "d_pace"


@dataclass(kw_only=True)
class WeightsConfig:
    """loss.weights.*

    scheme: uniform counts every position alike (of eagle3 and parallel: with draft.step_decay, which
        any other scheme takes the place of).
    block_tokens: K, positions of a block; as many as are drafted when the drafter is used. Of eagle3
        and parallel a block has draft.steps positions instead.
    decay: of a position's weight towards the next (decay, first_rejection).
    smoothing: d_pace: 0 trusts the draft's probabilities, 1 makes the weights those of a line.
    """

    scheme: WeightScheme = WeightScheme.uniform
    block_tokens: int = 4
    decay: float = 0.8
    smoothing: float = 0.1

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(
                f"loss.weights.block_tokens must be at least 1, got {self.block_tokens}"
            )
        for name in ("decay", "smoothing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"loss.weights.{name} must lie between 0 and 1, got {getattr(self, name)}"
                )


def decayed(num_positions: int, decay: float, device: torch.device | None = None) -> Tensor:
    """[K] decay^k, k from 0: later positions are reached less often.

    Source: Medusa, arXiv:2401.10774 (decay .8); the same in EAGLE-3 and the LK losses.
    """
    return decay ** torch.arange(num_positions, dtype=torch.float32, device=device)


def first_rejection_anchored(agrees: Tensor, decay: float) -> Tensor:
    """[M, K] 1 in front of the first refused position k*, decay^(k - k*) from there on.

    The decay starts where the round would end now instead of at the block's first token, so that
    the position that decides about the length always has the full weight.

    Source: VAT, arXiv:2608.30135 (greedy simulation of verification; setting the weights behind k*
    to 0 collapses, so they only decay).

    Args:
        agrees: [M, K] bool, where the draft's first choice is the target's.
    """
    steps = torch.arange(agrees.shape[-1], device=agrees.device)
    num_kept = agrees.int().cumprod(-1).sum(-1, keepdim=True)  # [M, 1]: also the index of k*
    return decay ** (steps - num_kept).clamp_min(0).float()


def d_pace(token_probs: Tensor, smoothing: float, valid: Tensor) -> Tensor:
    """[M, K] w_k = sum over m >= k of s_1 ... s_m with s = (1 - smoothing) q(token) + smoothing.

    What one more accepted token at position k is worth: the expected number of tokens kept from it
    on. Source: D-PACE, arXiv:2605.18810, where q(token) = exp(-cross-entropy) and weights carry no
    gradient.

    Args:
        token_probs: [M, K] the draft's probability of the text's token.
        valid: [M, K] bool, true for the first K_i positions of a block that the text ends within.
    """
    survival = (((1 - smoothing) * token_probs + smoothing) * valid).cumprod(-1)
    return survival.flip(-1).cumsum(-1).flip(-1)


def expected_accepted_share(overlap: Tensor, valid: Tensor) -> Tensor:
    """[M] (1 / K) sum over m of overlap_1 ... overlap_m: expected accepted tokens / drafted ones.

    Source: end-to-end total variation, arXiv:2606.12370 (1 minus this is the loss there).

    Args:
        overlap: [M, K] sum of min(target, draft) at each position.
        valid: [M, K] bool, true for the first K_i positions of a block that the text ends within.
    """
    reached = torch.where(valid, overlap, 0.0).cumprod(-1)
    return reached.sum(-1) / valid.sum(-1)


def position_weights(
    config: WeightsConfig, *, agrees: Tensor, token_probs: Tensor | None, valid: Tensor
) -> Tensor:
    """[M, K] of the configured scheme, 0 where a block is not valid.

    Args:
        agrees: [M, K] bool. token_probs: [M, K], needed by d_pace. valid: [M, K] bool.
    """
    if config.scheme is WeightScheme.decay:
        weights = decayed(valid.shape[-1], config.decay, valid.device).expand(valid.shape)
    elif config.scheme is WeightScheme.first_rejection:
        weights = first_rejection_anchored(agrees, config.decay)
    elif config.scheme is WeightScheme.d_pace:
        assert token_probs is not None
        weights = d_pace(token_probs, config.smoothing, valid)
    else:
        weights = torch.ones(valid.shape, device=valid.device)
    return torch.where(valid, weights, 0.0)


def mean_one(weights: Tensor) -> Tensor:
    """The weights divided by their mean; ones where all are 0."""
    total = weights.sum()
    scaled = weights * (weights.numel() / total.clamp_min(torch.finfo(weights.dtype).tiny))
    return torch.where(total > 0, scaled, torch.ones_like(weights))


class BlocksOfText:
    """A block of up to K consecutive loss positions at every loss position of a batch of texts.

    Args:
        positions: [N] int64, ascending; those of one text follow each other without a gap and
            those of different texts do not (`distill.batches.Batch.positions`).
        block_tokens: K.

    Attributes:
        index: [N, K] loss position of each block's positions (any where not valid).
        valid: [N, K] bool; false behind the end of the text.
    """

    def __init__(self, positions: Tensor, block_tokens: int) -> None:
        steps = torch.arange(block_tokens, device=positions.device)
        reached = torch.arange(len(positions), device=positions.device)[:, None] + steps
        self.index = reached.clamp_max(len(positions) - 1)
        in_text = positions[self.index] == positions[:, None] + steps
        self.valid = in_text & (reached < len(positions))

    def of(self, values: Tensor) -> Tensor:
        """[N] -> [N, K]."""
        return values[self.index]

    def of_steps(self, values: Sequence[Tensor]) -> Tensor:
        """K times [N], of each step -> [N, K]: position k of a block from step k."""
        return torch.stack([one[at] for one, at in zip(values, self.index.T, strict=True)], dim=1)

    def by_step(self, weights: Tensor) -> Tensor:
        """[N, K] -> [K, N], the inverse; 0 where no block has that step of a position."""
        counted = torch.where(self.valid, weights, 0.0).T
        return torch.zeros_like(counted).scatter_add(1, self.index.T, counted)

    def folded(self, weights: Tensor) -> Tensor:
        """[N, K] -> [N]: what a position weighs in all blocks that it is part of."""
        counted = torch.where(self.valid, weights, 0.0)
        total = weights.new_zeros(len(weights))
        return total.index_add(0, self.index.flatten(), counted.flatten())
