"""The target's states that a drafter reads, kept from where the loop hands them over until it drafts.

Shapes: b rows, F states of a row, A layers of the target, D hidden size.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from specdec_runtime.target import Target


def require_states_of(config: PretrainedConfig, folder: str | Path, target: Target) -> None:
    """Compares what a drafter reads with what a target has.

    Raises:
        ValueError: if the states have another size, or the target is not as deep.
    """
    wanted, found = config.target_hidden_size, target.model.hidden_size
    deepest = config.eagle_aux_hidden_state_layer_ids[-1]
    if wanted != found or deepest > target.model.num_layers:
        raise ValueError(
            f"{folder} reads states of size {wanted}, the deepest after {deepest} layers; "
            f"{target.name} has {found} and {target.model.num_layers}: "
            "expected a drafter trained for this target"
        )


class HandedOver:
    """What the target has handed over for each row of one batch.

    Args:
        layers: of the target, whose states are laid side by side.
    """

    def __init__(self, batch_size: int, layers: Sequence[int]) -> None:
        self._layers = layers
        self._waiting: list[list[Tensor]] = [[] for _ in range(batch_size)]  # each [F, A * D]
        self._count = [0] * batch_size  # states of each row so far

    def take(
        self, rows: list[int], committed: list[list[int]], features: dict[int, Tensor] | None
    ) -> None:
        """Keeps what came with a call of `DraftSession.propose`."""
        assert features, "the loop hands over the hidden layers that a drafter names"
        states = torch.cat([features[k] for k in self._layers], dim=-1)
        for member, (row, tokens) in enumerate(zip(rows, committed, strict=True)):
            count = len(tokens) - 1 - self._count[row]
            self._waiting[row].append(states[member, :count])
            self._count[row] += count

    def num_read(self, row: int) -> int:
        """States of a row that its drafter has read."""
        return self._count[row] - sum(map(len, self._waiting[row]))

    def read(self, row: int) -> Tensor:
        """[F, A * D] those that it has not read yet; from now on it has."""
        waiting, self._waiting[row] = self._waiting[row], []
        return waiting[0] if len(waiting) == 1 else torch.cat(waiting)
