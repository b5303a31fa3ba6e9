"""The loss of drafters that draft a fixed number of tokens from every position of a text.

Each of the steps is scored at all loss positions, as the token that a draft reaches there; later
steps weigh less, since they are reached less often.

Shapes: N loss positions, D what the head reads, n draft vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from distill.batches import Batch
from distill.chunked_head import head_loss
from distill.losses import LossConfig
from distill.objective import Terms, terms_of
from distill.signals import TargetHead
from distill.weighing import PerPosition, Weigh, Weighed, weigh_texts


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
        decay: weight of each step's loss relative to the one before.
        found_at: takes what was found at the positions of each step, if given.
    """
    weights = [decay**step for step in range(len(steps))]
    shares = [weight / sum(weights) for weight in weights]
    found: list[Terms] = []
    for states in steps:
        weigh = weigh_texts(config, batch.positions, given=batch.weights)
        if found_at is not None:
            weigh = _noting(weigh, found_at)
        sums = head_loss(states, head, target, batch.rows, batch.labels, config, weigh=weigh)
        found.append(terms_of(sums, batch.num_tokens))
    counts = dict(found[0].counts)
    for step, part in enumerate(found[1:], start=2):
        counts[f"overlap_step_{step}"] = part.counts["overlap"]
    losses = [share * part.loss_sum for share, part in zip(shares, found, strict=True)]
    return Terms(torch.stack(losses).sum(), batch.num_tokens, counts)


def _noting(weigh: Weigh | None, found_at: list[PerPosition]) -> Weigh:
    def noted(found: PerPosition) -> Weighed:
        found_at.append(found)
        return Weighed(torch.ones_like(found.overlap)) if weigh is None else weigh(found)

    return noted
