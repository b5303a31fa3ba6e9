"""The training loop: one turn is one optimizer step, and every decision is a function of the step.

Losses come from the objective as sums; the gradient is divided once by the valid tokens of all
micro-batches and ranks, so 1 process x 4 micro-batches, 2 x 2 and 4 x 1 take the same step.
"""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import AdamW

from distill.batches import Batch
from distill.objective import Objective, Terms
from train.checkpoint import TrainState
from train.interrupts import Interrupted, StopRequest
from train.metrics import MetricSums
from train.optim import OptimConfig, learning_rate_at, make_optimizer, set_learning_rate
from train.precision import Precision, autocast
from train.processes import on_main
from train.progress import StageProgress
from train.rng import rng_untouched
from train.run_log import RunLog, Value

MicroBatches = Callable[[int], Batch]  # number of a micro-batch in the endless stream -> the batch


class DrafterLoss(nn.Module):
    """The drafter with its objective: what is wrapped for many processes, so that every use of a
    weight happens inside one forward call. It holds no parameter but the drafter's."""

    def __init__(self, drafter: nn.Module, objective: Objective, precision: Precision) -> None:
        super().__init__()
        self.drafter = drafter
        self._objective = objective
        self._precision = precision

    def forward(self, batch: Batch) -> Terms:
        device = next(self.drafter.parameters()).device
        with autocast(self._precision, device):
            return self._objective(self.drafter, batch)


@dataclass(frozen=True)
class Parts:
    """What a step works on. `drafter` is the bare module, `loss` the same one, wrapped."""

    accelerator: Accelerator
    drafter: nn.Module
    loss: nn.Module
    optimizer: AdamW
    micro_batches: MicroBatches
    accumulation_steps: int


@dataclass(frozen=True)
class Measurement:
    """Acceptance of the drafter as it is now; `score` decides which checkpoint is best."""

    score: float
    values: dict[str, Value]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """After how many steps something is due; all are due at the last step."""

    log: int
    save: int
    acceptance: int


def make_parts(
    accelerator: Accelerator,
    drafter: nn.Module,
    objective: Objective,
    micro_batches: MicroBatches,
    *,
    optim: OptimConfig,
    accumulation_steps: int,
    precision: Precision,
) -> Parts:
    """Moves the drafter to the device and wraps it for the processes there are.

    Accumulation is ours: the Accelerator's own setting must be 1,
    because its `backward` divides by it.
    """
    assert accelerator.gradient_accumulation_steps == 1
    drafter.to(accelerator.device)
    wrapped = accelerator.prepare(DrafterLoss(drafter, objective, precision))
    optimizer = make_optimizer(drafter.parameters(), optim)
    return Parts(accelerator, drafter, wrapped, optimizer, micro_batches, accumulation_steps)


def train(
    parts: Parts,
    state: TrainState,
    *,
    optim: OptimConfig,
    every: Intervals,
    run_log: RunLog,
    measure: Callable[[], Measurement],
    save: Callable[[TrainState], None],
    stop: StopRequest,
    progress: StageProgress,
) -> None:
    """Trains from `state.step` to `state.max_steps`, in place.

    Raises:
        ValueError: at the first loss or gradient that is not finite.
        Interrupted: after a signal, with the finished step saved.
    """
    # What a checkpoint holds are the sums over all ranks: one of them goes on with them.
    sums = MetricSums(state.metric_sums if parts.accelerator.is_main_process else None)
    with stop.deferred():
        while state.step < state.max_steps:
            parts.drafter.train()
            start = time.perf_counter()
            step = optimizer_step(parts, state, optim, sums, stop_requested=stop.signum is not None)
            state.seconds += time.perf_counter() - start
            due = _due(state, every)
            if due.log:
                _log(parts, state, step, sums, run_log, progress)
            improved = due.acceptance and _measure(parts, state, measure, run_log)
            if due.save or improved or step.stop_requested:
                state.metric_sums = sums.totals(parts.accelerator)
                save(state)
            if step.stop_requested:
                raise Interrupted(stop.signum or 15)  # another rank got the signal: SIGTERM


@dataclass(frozen=True)
class Step:
    learning_rate: float
    grad_norm: float
    num_tokens: int  # valid tokens of the step, over all ranks
    stop_requested: bool  # on any rank


def optimizer_step(
    parts: Parts, state: TrainState, optim: OptimConfig, sums: MetricSums, *, stop_requested: bool
) -> Step:
    """Takes step number `state.step + 1` and advances `state`."""
    batches = _own_batches(parts, state.step)
    num_tokens, stop_requested = _totals(parts.accelerator, batches, stop_requested)
    loss_sum = torch.zeros((), device=parts.accelerator.device)
    for number, batch in enumerate(batches, start=1):
        last = number == len(batches)
        with nullcontext() if last else parts.accelerator.no_sync(parts.loss):
            terms = parts.loss(batch.to(parts.accelerator.device))
            # DDP averages over ranks; the loss is a sum over ranks.
            scale = parts.accelerator.num_processes / max(num_tokens, 1)
            parts.accelerator.backward(terms.loss_sum * scale)
        sums.add(terms)
        loss_sum += terms.loss_sum.detach()
    norm = parts.accelerator.clip_grad_norm_(parts.drafter.parameters(), optim.max_grad_norm)
    assert isinstance(norm, Tensor)
    # The only wait for the device in a step: an update from a bad gradient can not be taken back.
    finite_loss, grad_norm = torch.stack([loss_sum.double(), norm.double()]).tolist()
    _require_finite(
        finite_loss, grad_norm, state.step + 1, parts.accelerator.process_index, batches
    )
    learning_rate = learning_rate_at(state.step + 1, state.max_steps, optim)
    set_learning_rate(parts.optimizer, learning_rate)
    parts.optimizer.step()
    parts.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.num_tokens += num_tokens
    return Step(learning_rate, grad_norm, num_tokens, stop_requested)


def measured_step_s(parts: Parts, optim: OptimConfig, *, seconds: float = 5.0) -> float:
    """Seconds of one optimizer step here, measured on the first batches; leaves no trace.

    The first step is not counted: it allocates, and compiles where that is asked for.
    """
    trained = [parameter for parameter in parts.drafter.parameters() if parameter.requires_grad]
    weights = [parameter.detach().clone() for parameter in trained]
    state = TrainState(max_steps=10**9)
    times: list[float] = []
    parts.drafter.train()
    with rng_untouched():
        while len(times) < 2 or (sum(times) < seconds and len(times) < 20):
            start = time.perf_counter()
            optimizer_step(parts, state, optim, MetricSums(), stop_requested=False)
            times.append(time.perf_counter() - start)
    with torch.no_grad():
        for parameter, before in zip(trained, weights, strict=True):
            parameter.copy_(before)
    parts.optimizer.state.clear()
    own_s = sum(times[1:]) / len(times[1:])
    return on_main(parts.accelerator, lambda: own_s)


def steps_in(budget_s: float, *, step_s: float, acceptance_s: float, acceptance_every: int) -> int:
    """How many steps, with their share of acceptance measurements, fit into a time; at least 1."""
    return max(1, math.floor(budget_s / (step_s + acceptance_s / acceptance_every)))


def _own_batches(parts: Parts, step: int) -> list[Batch]:
    """This rank's micro-batches of one step. A step takes the next processes x accumulation ones of
    the stream; which rank gets which does not change the step."""
    processes, rank = parts.accelerator.num_processes, parts.accelerator.process_index
    first = step * processes * parts.accumulation_steps
    numbers = (first + turn * processes + rank for turn in range(parts.accumulation_steps))
    return [parts.micro_batches(number) for number in numbers]


def _totals(accelerator: Accelerator, batches: list[Batch], stop: bool) -> tuple[int, bool]:
    """(valid tokens of the step, whether any rank was asked to stop), agreed between ranks."""
    num_tokens = sum(batch.num_tokens for batch in batches)
    if accelerator.num_processes == 1:
        return num_tokens, stop
    own = torch.tensor([num_tokens, int(stop)], device=accelerator.device)
    total = accelerator.reduce(own, reduction="sum").tolist()
    return total[0], total[1] > 0


def _require_finite(
    loss: float, grad_norm: float, step: int, rank: int, batches: list[Batch]
) -> None:
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {grad_norm}"
    ids = ", ".join(name for batch in batches for name in batch.ids)
    raise ValueError(
        f"{what} at step {step} on rank {rank}; the last checkpoint is intact. "
        f"Lower optim.learning_rate or look at these examples: {ids}"
    )


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
    parts: Parts, state: TrainState, step: Step, sums: MetricSums, log: RunLog, bar: StageProgress
) -> None:
    ratios = sums.reduce(parts.accelerator)
    values: dict[str, Value] = {**ratios, "learning_rate": step.learning_rate}
    values |= {"grad_norm": step.grad_norm, "num_tokens": state.num_tokens}
    values |= {"tokens_per_s": state.num_tokens / max(state.seconds, 1e-9)}
    log.write("training", state.step, values)
    best = f"  acceptance length {state.best_score:.2f}" if state.best_score is not None else ""
    bar.update(state.step, state.max_steps, f"loss {ratios['loss']:.4f}{best}")


def _measure(
    parts: Parts, state: TrainState, measure: Callable[[], Measurement], log: RunLog
) -> bool:
    """Measures acceptance, logs it, and says whether it is the best so far."""
    with rng_untouched():
        result = on_main(parts.accelerator, measure)
    log.write("acceptance", state.step, result.values | {"seconds": result.seconds})
    return state.is_best(result.score)
