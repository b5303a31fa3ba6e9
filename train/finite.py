"""Losses and gradients that are not finite: found on the device, reported when something is due.

Looking at a number of the device every step would make the host wait every step. So the first bad
step is noted where it happens, and the host reads the note before anything is logged, measured or
saved: no checkpoint is ever written from weights that a bad gradient has touched.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from train.parts import Parts
from train.processes import from_all

MIN_LOSS_SCALE = 1.0  # float16 halves its scale at every overflow; below this it will not recover


@dataclass(frozen=True)
class BadStep:
    """What one process saw."""

    step: int
    rank: int
    loss: float
    grad_norm: float
    ids: list[str]


class FiniteWatch:
    """Notes the first step whose loss or gradient is not finite; one a training session."""

    def __init__(self, device: torch.device) -> None:
        # [3] step (0 = none so far), loss, gradient norm
        self._note = torch.zeros(3, dtype=torch.float64, device=device)
        self._ids: dict[int, list[str]] = {}  # examples of the steps that were not looked at yet

    def add(
        self, step: int, loss: Tensor, grad_norm: Tensor, ids: list[str], *, scaled: bool
    ) -> None:
        """`scaled`: float16, where a gradient that overflows is skipped and no error."""
        bad = ~loss.isfinite()
        if not scaled:
            bad = bad | ~grad_norm.isfinite()
        number = torch.full_like(loss, step)
        now = torch.stack([number, loss, grad_norm]).to(self._note.dtype)
        self._note = torch.where(bad & (self._note[0] == 0), now, self._note)
        self._ids[step] = ids

    def require(self, parts: Parts) -> None:
        """Waits for the device.

        Raises:
            ValueError: on every process, if any of them noted a bad step.
        """
        step, loss, grad_norm = self._note.tolist()
        rank = parts.accelerator.process_index
        own = BadStep(int(step), rank, loss, grad_norm, self._ids.get(int(step), []))
        self._ids = {}
        found = [one for one in from_all(parts.accelerator, own) if one.step]
        if found:
            raise ValueError(_sentence(found))
        if parts.scaler.is_enabled() and parts.scaler.get_scale() < MIN_LOSS_SCALE:
            raise ValueError(
                f"float16 losses overflow even at a scale of {parts.scaler.get_scale():g}; the last "
                "checkpoint is intact. Use training.precision=bf16 or fp32"
            )


def _sentence(found: list[BadStep]) -> str:
    first = min(one.step for one in found)
    here = [one for one in found if one.step == first]
    # A bad loss on one process makes the gradient bad on all: name the one it came from.
    with_bad_loss = [one for one in here if not math.isfinite(one.loss)]
    blamed = with_bad_loss or here
    what = f"loss {blamed[0].loss}" if with_bad_loss else f"gradient norm {blamed[0].grad_norm}"
    ranks = ", ".join(str(one.rank) for one in blamed)
    ids = ", ".join(name for one in blamed for name in one.ids)
    return (
        f"{what} at step {first} on rank {ranks}; the last checkpoint is intact. "
        f"Lower optim.learning_rate or look at these examples: {ids}"
    )
