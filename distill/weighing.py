"""Which positions of a batch of texts count how much, from what was found at each of them.

What `position_weights.py` says about a block of drafted positions is laid on texts here: a round may
begin at any token, so every token begins a block. Of a causal LM a position is one prediction, in
whichever blocks it lies (`weigh_texts`); a head that is scored for each step of a draft has another
one at each place of a block (`weigh_drafts`). The weights come from the same pass as the loss
(`chunked_head.py`) and have no gradient of their own.

Shapes: N loss positions of a batch, K positions of a block: for `weigh_drafts` the steps.
"""

from collections.abc import Callable, Sequence
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


def weighs_blocks(config: LossConfig) -> bool:
    """Whether the loss asks for weights that follow from what a whole draft would be kept for."""
    uniform = config.weights.scheme is WeightScheme.uniform
    return config.name is LossName.expected_length or not uniform


def weigh_drafts(
    config: LossConfig, positions: Tensor, found: Sequence[PerPosition]
) -> list[Weighed]:
    """What the loss asks for, for each step of drafts of len(found) tokens from every position.

    The draft whose first token is that of loss position i is scored at step k on position i + k. In
    decoding, drafts begin behind the prompt: what was scored of those that begin within it counts
    nothing here.

    Args:
        positions: [N] of the batch, see `BlocksOfText`.
        found: of each step.
    """
    blocks = BlocksOfText(positions, len(found))
    if config.name is LossName.expected_length:
        overlaps = torch.stack([one.overlap for one in found])
        return _expected_length_of_drafts(overlaps, blocks)
    weights = position_weights(
        config.weights,
        agrees=blocks.of_steps([one.agrees for one in found]),
        token_probs=blocks.of_steps([one.token_probs for one in found]),
        valid=blocks.valid,
    )
    return [Weighed(one) for one in mean_one(blocks.by_step(weights)) / len(found)]


def _expected_length_of_drafts(overlaps: Tensor, blocks: BlocksOfText) -> list[Weighed]:
    """As `_expected_length`, [K, N] overlaps: step k of a draft has the overlap found at that step."""
    with torch.enable_grad():
        overlap = overlaps.detach().requires_grad_()
        share = expected_accepted_share(blocks.of_steps(list(overlap)), blocks.valid)
        value = (1 - share).sum()
        (gradient,) = torch.autograd.grad(value, overlap)
    rest = [Weighed(-of_step, value.new_zeros(())) for of_step in gradient[1:]]
    return [Weighed(-gradient[0], value.detach()), *rest]


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
