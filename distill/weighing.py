"""Which positions of a batch of texts count how much, from what was found at each of them.

What `position_weights.py` says about a block of drafted positions is laid on texts here: a causal LM
may start a round at any token, so every token begins a block. The weights come from the same pass as
the loss (`chunked_head.py`) and have no gradient of their own.

Shapes: N loss positions of a batch, K positions of a block.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from distill.losses import LossConfig, LossName
from distill.position_weights import (
    BlocksOfText,
    WeightScheme,
    expected_accepted_share,
    mean_one,
    position_weights,
)


class PerPosition(NamedTuple):
    """What was found at each of N positions; without gradient."""

    agrees: Tensor  # [N] bool: the draft's first choice is the target's
    overlap: Tensor  # [N] sum of min(target, draft)
    token_probs: Tensor  # [N] the draft's probability of the text's token; only for d_pace


class Weighed(NamedTuple):
    """weights: [N], times the loss of each position. value: the loss, where it is not that sum."""

    weights: Tensor
    value: Tensor | None = None


Weigh = Callable[[PerPosition], Weighed]


def weigh_texts(
    config: LossConfig,
    positions: Tensor,
    *,
    given: Tensor | None = None,
    reference_overlap: Tensor | None = None,
) -> Weigh | None:
    """What the loss asks for, for the texts of a batch; None where all positions count alike.

    Args:
        positions: [N] of the batch, see `BlocksOfText`.
        given: [N] weights that the batch itself has; they rule out all others.
        reference_overlap: [N] the reference's, where positions are selected.
    """
    if given is not None:
        return lambda found: Weighed(given)
    if config.name is LossName.expected_length:
        return lambda found: _expected_length(found, positions, config.weights.block_tokens)
    if config.weights.scheme is WeightScheme.uniform and reference_overlap is None:
        return None
    return lambda found: Weighed(_weights(config, found, positions, reference_overlap))


def _weights(
    config: LossConfig, found: PerPosition, positions: Tensor, reference_overlap: Tensor | None
) -> Tensor:
    weights = torch.ones_like(found.overlap)
    if config.weights.scheme is not WeightScheme.uniform:
        blocks = BlocksOfText(positions, config.weights.block_tokens)
        weights = blocks.folded(
            position_weights(
                config.weights,
                agrees=blocks.of(found.agrees),
                token_probs=blocks.of(found.token_probs),
                valid=blocks.valid,
            )
        )
    if reference_overlap is not None:
        weights = weights * learnable(reference_overlap, found.overlap, config.selection.share)
    return mean_one(weights)


def learnable(reference_overlap: Tensor, overlap: Tensor, share: float) -> Tensor:
    """[N] 1 at the positions where the reference is furthest ahead of the draft, else 0.

    Source: AdaSPEC, arXiv:2510.19779, which selects by the difference of two KL divergences; here
    by the difference of what is to be gained, the overlap. Ties go to the earlier position.
    """
    number = max(1, round(share * len(overlap)))
    gaps = (reference_overlap - overlap).sort(descending=True, stable=True).indices
    return torch.zeros_like(overlap).index_fill(0, gaps[:number], 1.0)


def _expected_length(found: PerPosition, positions: Tensor, block_tokens: int) -> Weighed:
    """sum over positions of 1 - (expected accepted tokens of a round from there) / K.

    Its gradient in a position's overlap is taken here and handed back as the weight of that
    position's total variation. It is small where earlier positions of a round are refused, so that
    it needs a warm start. Source: end-to-end total variation, arXiv:2606.12370.
    """
    blocks = BlocksOfText(positions, block_tokens)
    with torch.enable_grad():
        overlap = found.overlap.detach().requires_grad_()
        value = (1 - expected_accepted_share(blocks.of(overlap), blocks.valid)).sum()
        (gradient,) = torch.autograd.grad(value, overlap)
    return Weighed(-gradient, value.detach())
