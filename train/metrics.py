"""Sums and counts of a log interval; they become ratios only when they are written.

The loss of an interval is sum of losses / valid tokens over all micro-batches and ranks, never a
mean of means.
"""

import torch
from accelerate import Accelerator
from torch import Tensor

from distill.objective import Terms


class MetricSums:
    """Accumulates on the device, in float64, without waiting for it."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # name -> [2]: numerator, denominator

    def add(self, terms: Terms) -> None:
        self._add("loss", terms.loss_sum, terms.num_tokens)
        for name, (numerator, denominator) in terms.counts.items():
            self._add(name, numerator, denominator)

    def reduce(self, accelerator: Accelerator) -> dict[str, float]:
        """The ratios over all ranks since the last call; nan where nothing was counted."""
        names = sorted(self._sums)  # the same order on every rank
        sums = torch.stack([self._sums[name] for name in names])
        if accelerator.num_processes > 1:
            sums = accelerator.reduce(sums, reduction="sum")
        self._sums = {}
        ratios = {}
        for name, (numerator, denominator) in zip(names, sums.tolist(), strict=True):
            ratios[name] = numerator / denominator if denominator else float("nan")
        return ratios

    def _add(self, name: str, numerator: Tensor | int, denominator: Tensor | int) -> None:
        device = numerator.device if isinstance(numerator, Tensor) else None
        pair = torch.stack(
            [
                torch.as_tensor(value, dtype=torch.float64, device=device).detach()
                for value in (numerator, denominator)
            ]
        )
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair
