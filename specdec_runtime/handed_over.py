"""The target's states that a drafter reads, kept from where the loop hands them over until it drafts.

Shapes: b rows, F states of a row, A layers of the target, D hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


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
        states = torch.cat(self._waiting[row])
        self._waiting[row] = []
        return states
