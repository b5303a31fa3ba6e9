"""Sums and counts of a log interval; they become ratios only when they are written.

The loss of an interval is sum of losses / valid tokens over all micro-batches and ranks, never a
mean of means.
"""

import torch
from accelerate import Accelerator
from torch import Tensor

from distill.objective import Terms
from train.processes import from_all


class MetricSums:
    """Accumulates on the device, in float64, without waiting for it.

    Args:
        start: what `totals` gave when a run was stopped within an interval.
    """

    def __init__(self, start: dict[str, list[float]] | None = None) -> None:
        # name -> [2]: numerator, denominator
        self._sums = {
            name: torch.tensor(pair, dtype=torch.float64) for name, pair in (start or {}).items()
        }

    def add(self, terms: Terms) -> None:
        self._add("loss", terms.loss_sum, terms.num_tokens)
        for name, (numerator, denominator) in terms.counts.items():
            self._add(name, numerator, denominator)

    def totals(self, accelerator: Accelerator) -> dict[str, list[float]]:
        """The sums over all ranks so far, exactly, for a checkpoint; every rank calls it."""
        # Where the data ends a rank may have counted nothing, or nothing of a kind.
        names = sorted({name for own in from_all(accelerator, [*self._sums]) for name in own})
        if not names:
            return {}
        nothing = torch.zeros(2, dtype=torch.float64)
        own = [self._sums.get(name, nothing).to(accelerator.device) for name in names]
        sums = torch.stack(own)
        if accelerator.num_processes > 1:
            sums = accelerator.reduce(sums, reduction="sum")
        return dict(zip(names, sums.tolist(), strict=True))

    def reduce(self, accelerator: Accelerator) -> dict[str, float]:
        """The ratios over all ranks since the last call; nan where nothing was counted."""
        totals = self.totals(accelerator)
        self._sums = {}
        return {
            name: numerator / denominator if denominator else float("nan")
            for name, (numerator, denominator) in totals.items()
        }

    def _add(self, name: str, numerator: Tensor | int, denominator: Tensor | int) -> None:
        device = next((v.device for v in (numerator, denominator) if isinstance(v, Tensor)), None)
        pair = torch.stack([_float64(value, device) for value in (numerator, denominator)])
        before = self._sums.get(name)
        self._sums[name] = pair if before is None else before.to(pair.device) + pair


def _float64(value: Tensor | int, device: torch.device | None) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device=device, dtype=torch.float64)
    # A filled tensor, not a copied one: a copy to the device would wait for it.
    return torch.full((), value, dtype=torch.float64, device=device)
