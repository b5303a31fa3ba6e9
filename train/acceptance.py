"""Acceptance of the drafter while it trains: held-out prompts decoded by the runtime that serves.

It decides which checkpoint is the best one, and its cost is bounded: by default it is measured as
often as a tenth of the training time pays for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from torch import nn

from distill.recipe import RefreshableDrafter
from eval.acceptance import MeasuredAcceptance, measure_acceptance
from eval.trackers import Value
from specdec_runtime.auto_length import measured_policy
from specdec_runtime.stats import AcceptanceStats
from specdec_runtime.target import Target
from train.loop import Measurement
from train.processes import from_all
from train.samples import Sample

NUM_SAMPLES = 4  # answers shown token by token in a tracker
# Of the share, what is planned for: the costs are measured once, before training, and in a run of the
# default job the steps then took 10 % less time than that, one measurement 16 % more.
PLANNED_SHARE = 0.85
PROMPT_CHARS = 200  # of a sample's prompt; its end is enough to know it by


@dataclass(kw_only=True)
class AcceptanceConfig:
    """How acceptance is measured during training.

    num_prompts, max_new_tokens: the token budget of one measurement.
    num_draft_tokens, temperature: as the drafter will be used.
    every: optimizer steps between two measurements; null = as often as `share` allows.
    share: of the training time, at most.
    patience: training ends after so many measurements without a better one; null = never early.
    """

    num_prompts: int = 16
    max_new_tokens: int = 48
    num_draft_tokens: int = 3
    temperature: float = 0.0
    every: int | None = None
    share: float = 0.1
    patience: int | None = None
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
        if self.patience is not None and self.patience < 1:
            raise ValueError(
                f"acceptance.patience must be at least 1, got {self.patience}: null = no early end"
            )
        if not 0 < self.share < 1:
            raise ValueError(f"acceptance.share must lie between 0 and 1, got {self.share}")


def measure(
    accelerator: Accelerator,
    target: Target,
    drafter: RefreshableDrafter,
    module: nn.Module,
    prompt_ids: Sequence[list[int]],
    config: AcceptanceConfig,
    *,
    round_cost: float | None = None,
) -> Measurement:
    """Decodes the prompts with the weights that `module` has now; every process takes a share.

    `module`, which `drafter` drafts with, is in eval mode meanwhile and as before afterwards. The
    result is the same on every process, and for any number of them.

    Args:
        round_cost: of `measured_round_cost`; adds the predicted speedup.
    """
    rank, processes = accelerator.process_index, accelerator.num_processes
    own = range(rank, len(prompt_ids), processes)
    was_training = module.training
    module.eval()
    drafter.refresh()
    try:
        measured = _decode(target, drafter, prompt_ids, own, config) if own else None
    finally:
        module.train(was_training)
    shares = from_all(accelerator, (measured.stats, measured.seconds) if measured else None)
    done = [share for share in shares if share is not None]
    stats = sum((share[0] for share in done), AcceptanceStats())
    values: dict[str, Value] = {
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_by_position": list(stats.acceptance_by_position),
        "num_rounds": stats.num_rounds,
        "num_tokens": stats.num_tokens,
    }
    if round_cost is not None:
        values["predicted_speedup"] = stats.acceptance_length / round_cost
    samples = []
    if measured is not None and accelerator.is_main_process:
        samples = _samples(target.tokenizer, [prompt_ids[index] for index in own], measured)
    seconds = max(share[1] for share in done)
    return Measurement(stats.acceptance_length, values, seconds, samples)


def measured_round_cost(
    target: Target, drafter: RefreshableDrafter, config: AcceptanceConfig
) -> float:
    """What a round at the deployed draft length costs here, in tokens of plain decoding.

    Acceptance length / round cost is the speedup at batch size 1 that acceptance predicts.
    """
    number = config.num_draft_tokens
    costs = measured_policy(
        target, drafter, is_sampled=config.temperature > 0, max_draft_tokens=number
    )
    return costs.verify_cost[number] + costs.draft_start + number * costs.draft_cost


def _decode(
    target: Target,
    drafter: RefreshableDrafter,
    prompt_ids: Sequence[list[int]],
    own: range,
    config: AcceptanceConfig,
) -> MeasuredAcceptance:
    return measure_acceptance(
        target,
        drafter,
        [prompt_ids[index] for index in own],
        num_draft_tokens=config.num_draft_tokens,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=[config.seed + index for index in own],
        batch_size=config.batch_size,
    )


def _samples(
    tokenizer: Any, prompt_ids: Sequence[list[int]], measured: MeasuredAcceptance
) -> list[Sample]:
    """The first answers of a measurement, token by token."""
    answers = list(zip(prompt_ids, measured.token_ids, measured.kinds, strict=True))
    samples = []
    for ids, token_ids, kinds in answers[:NUM_SAMPLES]:
        texts = [tokenizer.decode([token_id]) for token_id in token_ids]
        prompt = tokenizer.decode(ids)[-PROMPT_CHARS:]
        samples.append(Sample(prompt, list(zip(texts, kinds, strict=True))))
    return samples


def interval(config: AcceptanceConfig, *, step_s: float, acceptance_s: float) -> int:
    """Optimizer steps between two measurements, as their measured costs allow."""
    if config.every is not None:
        return config.every
    share = config.share * PLANNED_SHARE
    return max(1, math.ceil(acceptance_s * (1 - share) / (share * step_s)))


def evenly(config: AcceptanceConfig, every: int, *, max_steps: int) -> int:
    """The interval, or a longer one that ends on the last step, where acceptance is measured anyway.

    Without it that last measurement may come a few steps after another and go beyond the share.
    It is fixed here and for good: a continued run measures where an undisturbed one does.
    """
    if config.every is not None:
        return config.every
    return math.ceil(max_steps / max(1, max_steps // every))
