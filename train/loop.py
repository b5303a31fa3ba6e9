"""The training loop: one turn is one optimizer step, and every decision is a function of the step.

Losses come from the objective as sums; the gradient is divided once by the valid tokens of all
micro-batches and ranks, so 1 process x 4 micro-batches, 2 x 2 and 4 x 1 take the same step.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from distill.batches import Batch
from eval.trackers import Value
from train.checkpoint import TrainState
from train.finite import FiniteWatch
from train.interrupts import Interrupted, StopRequest
from train.metrics import MetricSums
from train.optim import OptimConfig, learning_rate_at
from train.parts import Parts, gather_whole, host_sums, scatter_whole
from train.processes import on_main
from train.progress import StageProgress
from train.rng import rng_untouched
from train.run_log import RunLog
from train.samples import Sample
from train.sharding import trained_weights
from train.throughput import Throughput


@dataclass(frozen=True)
class Measurement:
    """Acceptance of the drafter as it is now; `score` decides which checkpoint is best."""

    score: float
    values: dict[str, Value]
    seconds: float
    samples: list[Sample] = field(default_factory=list)  # of the main process


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """After how many steps something is due; all are due at the last step."""

    log: int
    save: int
    acceptance: int


def train(
    parts: Parts,
    state: TrainState,
    *,
    optim: OptimConfig,
    every: Intervals,
    patience: int | None = None,
    run_log: RunLog,
    measure: Callable[[], Measurement],
    save: Callable[[TrainState], None],
    stop: StopRequest,
    progress: StageProgress,
) -> None:
    """Trains from `state.step` to `state.max_steps`, in place.

    Args:
        patience: ends the training after so many measurements without a better one.
        measure, save: called by every process.

    Raises:
        ValueError: for a loss or gradient that is not finite, before anything is made of it.
        Interrupted: after a signal, with the finished step saved.
    """
    # What a checkpoint holds are the sums over all ranks: one of them goes on with them.
    sums = MetricSums(state.metric_sums if parts.accelerator.is_main_process else None)
    watch, pace = FiniteWatch(parts.device), Throughput(parts.device)
    with stop.deferred():
        while state.step < state.max_steps and not state.ended_early:
            parts.drafter.train()
            start = time.perf_counter()
            step = optimizer_step(parts, state, optim, sums, stop_requested=stop.signum is not None)
            watch.add(
                state.step, step.loss, step.grad_norm, step.ids, scaled=parts.scaler.is_enabled()
            )
            due = _due(state, every)
            if due.log or due.save or due.acceptance or step.stop_requested:
                watch.require(parts)  # the only wait for the device
            state.seconds += pace.add(step.num_tokens, step.num_positions, since=start)
            if due.log:
                _log(parts, state, step, sums, pace, run_log, progress)
            improved = due.acceptance and _measure(parts, state, measure, run_log)
            if due.acceptance and patience is not None:
                state.ended_early = state.num_worse >= patience
            if due.save or improved or state.ended_early or step.stop_requested:
                state.metric_sums = sums.totals(parts.accelerator)
                save(state)
            if step.stop_requested:
                raise Interrupted(stop.signum or 15)  # another rank got the signal: SIGTERM


@dataclass(frozen=True)
class Step:
    """One optimizer step; the tensors are on the device and were not looked at.

    loss: sum over this process's tokens. grad_norm: over all processes, before clipping.
    num_tokens, num_positions: valid ones, and all with prompts and padding, over all processes.
    ids: of this process's examples. stop_requested: on any process.
    """

    learning_rate: float
    loss: Tensor
    grad_norm: Tensor
    num_tokens: int
    num_positions: int
    ids: list[str]
    stop_requested: bool


def optimizer_step(
    parts: Parts, state: TrainState, optim: OptimConfig, sums: MetricSums, *, stop_requested: bool
) -> Step:
    """Takes step number `state.step + 1` and advances `state`; waits for no device."""
    turns = _own_turns(parts, state)
    counted = [turn.batch for turn in turns if turn.counts]
    num_tokens, num_positions, stops = host_sums(
        parts,
        [
            sum(batch.num_tokens for batch in counted),
            sum(batch.token_ids.numel() for batch in counted),
            int(stop_requested),
        ],
    )
    # DDP and FSDP average over processes; the loss is a sum over processes.
    scale = parts.accelerator.num_processes / max(num_tokens, 1)
    loss_sum = torch.zeros((), device=parts.device)
    for number, turn in enumerate(turns, start=1):
        with parts.updates.micro_batch(is_last=number == len(turns)):
            terms = parts.loss(turn.batch)
            parts.updates.backward(terms.loss_sum * (scale if turn.counts else 0.0))
        if turn.counts:
            sums.add(terms)
            loss_sum += terms.loss_sum.detach()
    learning_rate = learning_rate_at(state.step + 1, state.max_steps, optim)
    norm = parts.updates.step(learning_rate)
    state.step += 1
    state.num_tokens += num_tokens
    ids = [name for batch in counted for name in batch.ids]
    return Step(learning_rate, loss_sum, norm, num_tokens, num_positions, ids, stops > 0)


def measured_step_s(parts: Parts, optim: OptimConfig, *, seconds: float = 12.0) -> float:
    """Seconds of one optimizer step here, measured on the first batches; leaves no trace.

    The first step is not counted: it allocates, and compiles where that is asked for. Of the others
    the median: how long the whole training gets hangs on it, and a disturbed step would shorten it.
    """
    trained = trained_weights(gather_whole(parts))
    weights = {name: tensor.clone() for name, tensor in trained.items()}
    scaler = parts.scaler.state_dict()
    state = TrainState(max_steps=10**9)
    times: list[float] = []
    parts.drafter.train()
    with rng_untouched():
        while _all_go_on(parts, times, seconds):
            start = time.perf_counter()
            step = optimizer_step(parts, state, optim, MetricSums(), stop_requested=False)
            step.grad_norm.item()  # waits for the device
            times.append(time.perf_counter() - start)
    with torch.no_grad():
        for name, tensor in trained.items():
            tensor.copy_(weights[name])
    scatter_whole(parts)
    parts.updates.forget_moments()
    parts.scaler.load_state_dict(scaler)
    own_s = statistics.median(times[1:])
    return on_main(parts.accelerator, lambda: own_s)


def _all_go_on(parts: Parts, times: list[float], seconds: float) -> bool:
    """Whether any process wants another step: all of them take part in each."""
    own = len(times) < 2 or (sum(times) < seconds and len(times) < 20)
    return host_sums(parts, [int(own)])[0] > 0


def steps_in(budget_s: float, *, step_s: float, acceptance_s: float, acceptance_every: int) -> int:
    """How many steps, with their share of acceptance measurements, fit into a time; at least 1."""
    return max(1, math.floor(budget_s / (step_s + acceptance_s / acceptance_every)))


class _Turn(NamedTuple):
    """One micro-batch of a process; `counts` is false where there was none left for it."""

    batch: Batch
    counts: bool


def _own_turns(parts: Parts, state: TrainState) -> list[_Turn]:
    """This process's micro-batches of one step.

    A step takes the next processes x accumulation ones of the stream; which process gets which does
    not change the step. Where the stream ends within a step, processes without a batch run one of
    the others' with weight 0, since all of them have to meet in the backward pass.
    """
    processes, rank = parts.accelerator.num_processes, parts.accelerator.process_index
    first = state.step * processes * parts.accumulation_steps
    num_turns = parts.accumulation_steps
    if state.num_micro_batches is not None:
        num_turns = min(num_turns, math.ceil((state.num_micro_batches - first) / processes))
    turns = []
    for turn in range(num_turns):
        number = first + turn * processes + rank
        counts = state.num_micro_batches is None or number < state.num_micro_batches
        batch = parts.micro_batches(number if counts else first)
        turns.append(_Turn(batch.to(parts.device), counts))
    return turns


def _due(state: TrainState, every: Intervals) -> "_Due":
    def due(interval: int) -> bool:
        return state.step % interval == 0 or state.step == state.max_steps

    return _Due(due(every.log), due(every.save), due(every.acceptance))


@dataclass(frozen=True)
class _Due:
    log: bool
    save: bool
    acceptance: bool


def _log(
    parts: Parts,
    state: TrainState,
    step: Step,
    sums: MetricSums,
    pace: Throughput,
    log: RunLog,
    bar: StageProgress,
) -> None:
    ratios, rates = sums.reduce(parts.accelerator), pace.take()
    values: dict[str, Value] = {**ratios, "learning_rate": step.learning_rate}
    values |= {"grad_norm": float(step.grad_norm), "num_tokens": state.num_tokens, **rates}
    if parts.scaler.is_enabled():
        values["loss_scale"] = parts.scaler.get_scale()
    log.write("training", state.step, values)
    best = f"  acceptance length {state.best_score:.2f}" if state.best_score is not None else ""
    note = f"loss {ratios['loss']:.4f}{best}  {rates['tokens_per_s']:.0f} tokens/s"
    bar.update(state.step, state.max_steps, note)


def _measure(
    parts: Parts, state: TrainState, measure: Callable[[], Measurement], log: RunLog
) -> bool:
    """Measures acceptance, logs it, and says whether it is the best so far."""
    with rng_untouched():
        result = measure()
    state.num_measurements += 1
    state.acceptance_s += result.seconds
    share = state.acceptance_s / max(state.acceptance_s + state.seconds, 1e-9)
    values = result.values | {"seconds": result.seconds, "share_of_time": share}
    values |= {"trained_tokens": state.num_tokens, "trained_minutes": state.seconds / 60}
    log.write("acceptance", state.step, values)
    log.write_samples(state.step, result.samples)
    return state.is_best(result.score)
