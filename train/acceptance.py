"""Acceptance of the drafter while it trains: held-out prompts decoded by the runtime that serves.

It decides which checkpoint is the best one, and its cost is bounded: by default it is measured as
often as a tenth of the training time pays for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from eval.acceptance import measure_acceptance
from specdec_runtime.draft import Drafter
from specdec_runtime.target import Target
from train.loop import Measurement
from train.run_log import Value


class RefreshableDrafter(Drafter, Protocol):
    """A drafter of the runtime around the module that is trained."""

    def refresh(self) -> None: ...


@dataclass(kw_only=True)
class AcceptanceConfig:
    """How acceptance is measured during training.

    num_prompts, max_new_tokens: the token budget of one measurement.
    num_draft_tokens, temperature: as the drafter will be used.
    every: optimizer steps between two measurements; null = as often as `share` allows.
    share: of the training time, at most.
    """

    num_prompts: int = 16
    max_new_tokens: int = 48
    num_draft_tokens: int = 3
    temperature: float = 0.0
    every: int | None = None
    share: float = 0.1
    batch_size: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("num_prompts", "max_new_tokens", "num_draft_tokens", "batch_size")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"acceptance.{name} must be at least 1, got {getattr(self, name)}")
        if self.temperature < 0:
            raise ValueError(f"acceptance.temperature must be 0 or more, got {self.temperature}")
        if self.every is not None and self.every < 1:
            raise ValueError(
                f"acceptance.every must be at least 1, got {self.every}: "
                "null measures as often as acceptance.share allows"
            )
        if not 0 < self.share < 1:
            raise ValueError(f"acceptance.share must lie between 0 and 1, got {self.share}")


def measure(
    target: Target,
    drafter: RefreshableDrafter,
    module: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    config: AcceptanceConfig,
) -> Measurement:
    """Decodes the prompts with the weights that `module` has now.

    `module`, which `drafter` drafts with, is in eval mode meanwhile and as before afterwards.
    """
    was_training = module.training
    module.eval()
    drafter.refresh()
    try:
        measured = measure_acceptance(
            target,
            drafter,
            prompt_ids,
            num_draft_tokens=config.num_draft_tokens,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            seed=config.seed,
            batch_size=config.batch_size,
        )
    finally:
        module.train(was_training)
    stats = measured.stats
    values: dict[str, Value] = {
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_by_position": list(stats.acceptance_by_position),
        "num_rounds": stats.num_rounds,
        "num_tokens": stats.num_tokens,
    }
    return Measurement(stats.acceptance_length, values, measured.seconds)


def interval(config: AcceptanceConfig, *, step_s: float, acceptance_s: float) -> int:
    """Optimizer steps between two measurements."""
    if config.every is not None:
        return config.every
    return max(1, math.ceil(acceptance_s * (1 - config.share) / (config.share * step_s)))
