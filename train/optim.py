"""Optimizer settings, the optimizer, and the learning rate as a pure function of the step.

There is no scheduler object: `learning_rate_at(step, ...)` needs no state, so a resumed run, and a
run on more processes, gets the same rate at the same optimizer step.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from torch import nn
from torch.optim import AdamW


class Schedule(Enum):
    cosine = "cosine"
    linear = "linear"
    constant = "constant"


@dataclass(kw_only=True)
class OptimConfig:
    """AdamW and its schedule. Default values: docs of the drafter recipes, see README."""

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: Schedule = Schedule.cosine
    warmup_fraction: float = 0.04  # of all steps
    final_fraction: float = 0.05  # learning rate at the last step / learning_rate

    def __post_init__(self) -> None:
        positive = ("learning_rate", "eps", "max_grad_norm")
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"optim.{name} must be positive, got {getattr(self, name)}")
        if self.weight_decay < 0:
            raise ValueError(f"optim.weight_decay must be 0 or more, got {self.weight_decay}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas must be two numbers in [0, 1), got {list(self.betas)}")
        for name in ("warmup_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"optim.{name} must lie in [0, 1], got {getattr(self, name)}")


def learning_rate_at(step: int, max_steps: int, config: OptimConfig) -> float:
    """The rate of optimizer step `step`, counted from 1; the last step gets the final rate."""
    assert 1 <= step <= max_steps, f"step {step} outside 1..{max_steps}"
    warmup_steps = math.ceil(config.warmup_fraction * max_steps)
    if step <= warmup_steps and max_steps > warmup_steps:
        return config.learning_rate * step / warmup_steps
    if config.schedule is Schedule.constant:
        return config.learning_rate
    done = (step - warmup_steps) / max(max_steps - warmup_steps, 1)  # in (0, 1]
    remaining = (
        1 - done if config.schedule is Schedule.linear else (1 + math.cos(math.pi * done)) / 2
    )
    floor = config.final_fraction
    return config.learning_rate * (floor + (1 - floor) * remaining)


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> AdamW:
    """AdamW over what is trainable; vectors (norms, biases) are never decayed.

    Raises:
        ValueError: if nothing is trainable, or a trainable weight is not a float32 master.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        raise ValueError("the drafter has no trainable parameter: set draft.freeze_* to false")
    # Updates of size lr vanish in bf16 weights (8 bits of mantissa), so masters stay float32.
    low = {str(p.dtype) for p in trainable if p.element_size() < 4}
    assert not low, f"trainable weights must be float32, got {sorted(low)}"
    matrices = [parameter for parameter in trainable if parameter.ndim >= 2]
    vectors = [parameter for parameter in trainable if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=True,
    )


def set_learning_rate(optimizer: AdamW, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
