"""The target's states on recorded texts, for starts that are solved from them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from distill.batches import Example
from distill.signals import TargetRows

START_POSITIONS = 20_000  # to solve a start from; more change little
SMALLEST_SIZE = 0.03  # of a levelled dimension: what is smaller is not blown up further


def last_states(example: Example) -> Tensor:
    """[N, D] what the target's head reads at the loss positions, as recorded.

    Raises:
        ValueError: if the signal has another form.
    """
    if not isinstance(example.rows, TargetRows):
        raise ValueError(
            "the start is solved from hidden states: choose signals.form=hidden or live"
        )
    return example.rows.hidden


def inner_states(example: Example) -> Tensor:
    """[S, F] float32 of the layers that a drafter reads.

    Raises:
        ValueError: if they were not recorded.
    """
    if example.features is None:
        raise ValueError("these answers have no recorded features: see distill/features.py")
    return example.features.float()


def mean_size(examples: Sequence[Example]) -> float:
    """Root mean square of the target's last states.

    Raises:
        ValueError: if there is no position.
    """
    states = torch.cat([last_states(example) for example in examples[:64]])
    if not len(states):
        raise ValueError("no position to fit the drafter on: expected answers with tokens")
    return float(states.float().square().mean().sqrt())
