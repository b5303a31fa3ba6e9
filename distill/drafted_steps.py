"""The loss of drafters that draft a fixed number of tokens from every position of a text.

Each of the steps is scored at all loss positions, as the token that a draft reaches there; later
steps weigh less, since they are reached less often: by a fixed decay, or by what the drafts of now
would be kept for (`loss.weights`, weighing.py).

Shapes: N loss positions, D what the head reads, n draft vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from distill.batches import Batch
from distill.chunked_head import HeadPass
from distill.losses import LossConfig
from distill.objective import Terms, terms_of
from distill.position_weights import decayed
from distill.signals import TargetHead
from distill.weighing import PerPosition, Weighed, weigh_drafts, weighs_blocks


def loss_places(batch: Batch, deepest: int) -> tuple[Tensor, Tensor]:
    """(rows, places), both [N]: where the loss positions are in the batch's texts.

    Args:
        deepest: tokens that there have to be up to each place for a whole draft to reach it.

    Raises:
        ValueError: if the features are missing, or a prompt is too short.
    """
    if batch.features is None:
        raise ValueError("these answers have no recorded features: see distill/features.py")
    width = batch.token_ids.shape[1]
    rows, places = batch.positions // width, batch.positions % width
    first = min(first for first, _ in batch.spans)
    if first < deepest:
        raise ValueError(
            f"a prompt of {first + 1} tokens is too short for a draft of so many "
            f"tokens: expected prompts of more than {deepest}; set draft.steps lower"
        )
    return rows, places


def drafted_terms(
    steps: Sequence[Tensor],
    head: Tensor,
    target: TargetHead,
    batch: Batch,
    config: LossConfig,
    *,
    decay: float,
    found_at: list[PerPosition] | None = None,
) -> Terms:
    """The weighted losses of all steps; the counts are those of the first, and each step's overlap.

    Args:
        steps: of each step, [N, D] what the head reads.
        head: [n, D].
        decay: weight of each step's loss relative to the one before, where `config` has no weights.
        found_at: takes what was found at the positions of each step, if given.
    """
    passes = [HeadPass(states, head, target, batch.rows, batch.labels, config) for states in steps]
    if found_at is not None:
        found_at += [one.found for one in passes]
    weighed = _weighed(passes, batch, config, decay)
    found = [
        terms_of(one.sums(weights), batch.num_tokens)
        for one, weights in zip(passes, weighed, strict=True)
    ]
    counts = dict(found[0].counts)
    for step, part in enumerate(found[1:], start=2):
        counts[f"overlap_step_{step}"] = part.counts["overlap"]
    loss = torch.stack([part.loss_sum for part in found]).sum()
    return Terms(loss, batch.num_tokens, counts)


def _weighed(
    passes: Sequence[HeadPass], batch: Batch, config: LossConfig, decay: float
) -> list[Weighed]:
    """How much each position of each step counts; a mean of 1 over positions, 1 in sum over steps."""
    if not weighs_blocks(config):
        of_step = decayed(len(passes), decay, batch.positions.device)
        return [Weighed(share.expand(batch.num_tokens)) for share in of_step / of_step.sum()]
    return weigh_drafts(config, batch.positions, [one.found for one in passes])
