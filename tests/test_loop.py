"""The training loop: what a step computes, how it stops, and that processes do not change it."""

import json
import math
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn

from tests.toy_training import (
    ToyBatch,
    ToyDrafter,
    ToyTerms,
    as_rank,
    cross_entropy,
    exit_codes,
    forked,
    free_port,
    micro_batch,
    run_toy,
    toy_parts,
    weights,
    write_toy_drafter,
)
from train.checkpoint import OPTIMIZER, WEIGHTS, Checkpoints, TrainState
from train.finite import FiniteWatch
from train.interrupts import Interrupted, StopRequest
from train.loop import _own_turns, measured_step_s, optimizer_step, steps_in
from train.metrics import MetricSums
from train.optim import OptimConfig, Schedule, learning_rate_at, make_optimizer
from train.parts import Parts
from train.precision import Precision
from train.processes import from_all
from train.rng import capture_rng, seed_everything
from train.run_log import read_metrics
from train.session import resume, save
from train.sharding import is_fsdp
from train.zero import check_zero, is_zero

SAME_STEP = 1e-6  # float32 sums in another order


def take_steps(parts: Parts, number: int, *, learning_rate: float = 6e-4) -> MetricSums:
    state, sums = TrainState(max_steps=number), MetricSums()
    optim = OptimConfig(learning_rate=learning_rate)
    for _ in range(number):
        optimizer_step(parts, state, optim, sums, stop_requested=False)
    return sums


def test_loss_of_uneven_micro_batches_is_the_mean_over_tokens():
    sums = MetricSums()  # 1 token with loss 4, 9 tokens with loss 1: 1.3, not 2.5
    sums.add(ToyTerms(torch.tensor(4.0), 1, {}))
    sums.add(ToyTerms(torch.tensor(9.0), 9, {}))
    assert sums.reduce(Accelerator(cpu=True)) == {"loss": pytest.approx(1.3)}


def test_nothing_counted_is_nan_and_not_zero():
    sums = MetricSums()
    sums.add(ToyTerms(torch.tensor(0.0), 0, {}))
    assert torch.isnan(torch.tensor(sums.reduce(Accelerator(cpu=True))["loss"]))


def test_accumulated_gradient_equals_that_of_one_batch_with_all_tokens():
    parts = toy_parts(dropout=0.0, accumulation_steps=4)
    drafter = ToyDrafter(0.0)
    drafter.load_state_dict(parts.drafter.state_dict())
    batches = [micro_batch(number) for number in range(4)]
    losses = [cross_entropy(drafter, batch).loss_sum for batch in batches]
    (sum(losses) / sum(batch.num_tokens for batch in batches)).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in drafter.parameters()])

    step = optimizer_step(
        parts, TrainState(max_steps=1), OptimConfig(), MetricSums(), stop_requested=False
    )

    assert float(step.grad_norm) == pytest.approx(float(expected), abs=SAME_STEP)


def test_gradients_are_cut_to_the_norm_that_is_set():
    norms, cut = [], []
    for limit in (1e9, 0.05):
        parts = toy_parts(dropout=0.0, accumulation_steps=2, max_grad_norm=limit)
        state = TrainState(max_steps=9)
        step = optimizer_step(parts, state, OptimConfig(), MetricSums(), stop_requested=False)
        norms.append(float(step.grad_norm))
        first = [v for k, v in parts.updates.moments().items() if k.endswith("exp_avg")]
        cut.append(float(torch.nn.utils.get_total_norm(first)) / (1 - OptimConfig().betas[0]))
    assert norms[0] == norms[1]  # before clipping
    assert cut == pytest.approx([norms[0], 0.05], rel=1e-3)


def test_a_step_lowers_the_loss_on_repeated_data():
    parts = toy_parts(dropout=0.0)
    first = take_steps(parts, 5).reduce(parts.accelerator)["loss"]
    take_steps(parts, 200, learning_rate=0.05)
    assert take_steps(parts, 5).reduce(parts.accelerator)["loss"] < 0.8 * first


def test_learning_rate_warms_up_and_ends_at_its_final_value():
    config = OptimConfig(learning_rate=1.0, warmup_fraction=0.2, final_fraction=0.1)
    rates = [learning_rate_at(step, 10, config) for step in range(1, 11)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("max_steps", [1, 2, 7])
def test_every_schedule_is_defined_at_every_step(schedule: Schedule, max_steps: int):
    config = OptimConfig(schedule=schedule)
    rates = [learning_rate_at(step, max_steps, config) for step in range(1, max_steps + 1)]
    assert all(0 < rate <= config.learning_rate for rate in rates)


def test_only_trainable_float32_weights_are_optimised():
    drafter = ToyDrafter()
    drafter.embed.weight.requires_grad_(False)
    optimised = [
        p
        for group in make_optimizer(drafter.parameters(), OptimConfig()).param_groups
        for p in group["params"]
    ]
    assert {id(p) for p in optimised} == {id(drafter.head.weight), id(drafter.head.bias)}
    with pytest.raises(AssertionError, match="float32"):
        make_optimizer(ToyDrafter().to(torch.bfloat16).parameters(), OptimConfig())


def test_a_thousand_updates_too_small_for_bfloat16_arrive_in_the_masters():
    parts = toy_parts(dropout=0.0)
    before = weights(parts)["head.weight"]
    state = TrainState(max_steps=1000)
    optim = OptimConfig(learning_rate=1e-6, schedule=Schedule.constant)
    for _ in range(1000):
        optimizer_step(parts, state, optim, MetricSums(), stop_requested=False)
    moved = (parts.drafter.state_dict()["head.weight"] - before).abs()
    assert float(moved.max()) > 1e-4
    # The same steps on weights in bfloat16, each rounded away, are what this is about.
    stored = before.bfloat16()
    large = stored.abs() > 0.01
    assert torch.equal((stored + 1e-6)[large], stored[large])
    assert float(moved[large].max()) > 1e-4


def test_measuring_the_step_time_leaves_no_trace():
    measured, plain = toy_parts(), toy_parts()
    seed_everything(5)
    measured_step_s(measured, OptimConfig(), seconds=0.0)
    random_after = capture_rng()
    seed_everything(5)
    assert torch.equal(random_after.tensors["cpu"], capture_rng().tensors["cpu"])
    for parts in (measured, plain):
        seed_everything(6)
        take_steps(parts, 3)
    assert all(torch.equal(v, weights(plain)[k]) for k, v in weights(measured).items())


def test_the_step_budget_pays_for_the_measurements_too():
    assert steps_in(60, step_s=1.0, acceptance_s=0.0, acceptance_every=10) == 60
    assert steps_in(60, step_s=1.0, acceptance_s=10.0, acceptance_every=10) == 30
    assert steps_in(0.1, step_s=1.0, acceptance_s=0.0, acceptance_every=10) == 1


def test_a_loss_that_is_not_finite_stops_with_step_rank_and_examples(tmp_path: Path):
    seen = []

    def bad_at_third(drafter: nn.Module, batch: ToyBatch) -> ToyTerms:
        terms = cross_entropy(drafter, batch)
        seen.append(batch.ids)
        return ToyTerms(terms.loss_sum * (float("nan") if len(seen) == 3 else 1), 5, terms.counts)

    parts = toy_parts(objective=bad_at_third)
    with pytest.raises(ValueError, match=r"loss nan at step 3 on rank 0.*learning_rate") as error:
        run_toy(tmp_path, parts, max_steps=9, save_every=1)
    assert seen[2][0] in str(error.value)
    checkpoint, _ = Checkpoints(tmp_path, keep_last=2).newest()
    assert checkpoint is not None
    assert checkpoint.state.step == 2


def test_the_drafter_trains_again_after_a_measurement_that_set_it_to_eval(tmp_path: Path):
    modes = []

    def objective(drafter: nn.Module, batch: ToyBatch) -> ToyTerms:
        modes.append(drafter.training)
        drafter.eval()  # as a measurement may leave it
        return cross_entropy(drafter, batch)

    run_toy(tmp_path, toy_parts(objective=objective), max_steps=5)
    assert modes == [True] * 5


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_names_itself(tmp_path: Path, signum: signal.Signals):
    calls = []

    def signalled_in_second(drafter: nn.Module, batch: ToyBatch) -> ToyTerms:
        calls.append(batch.ids)
        if len(calls) == 2:
            os.kill(os.getpid(), signum)
        return cross_entropy(drafter, batch)

    parts = toy_parts(objective=signalled_in_second)
    with StopRequest() as stop, pytest.raises(Interrupted) as stopped:
        run_toy(tmp_path, parts, max_steps=9, save_every=100, stop=stop)
    assert stopped.value.signum == signum
    checkpoint, _ = Checkpoints(tmp_path, keep_last=2).newest()
    assert checkpoint is not None
    # The flag is read at the next step's start: at most one more step is taken, and it is saved.
    assert checkpoint.state.step == len(calls) <= 3


def test_every_step_is_logged_once_with_sums_turned_into_ratios(tmp_path: Path):
    run_toy(tmp_path, toy_parts(), max_steps=6)
    records = [record for record in read_metrics(tmp_path) if record["kind"] == "training"]
    assert [record["step"] for record in records] == list(range(1, 7))
    assert all(0 <= record["agreement"] <= 1 for record in records)


def test_a_bad_step_is_named_even_when_it_is_looked_at_later(tmp_path: Path):
    seen = []

    def bad_at_third(drafter: nn.Module, batch: ToyBatch) -> ToyTerms:
        terms = cross_entropy(drafter, batch)
        seen.append(batch.ids[0])
        return ToyTerms(terms.loss_sum * (float("nan") if len(seen) == 3 else 1), 5, terms.counts)

    parts = toy_parts(objective=bad_at_third)
    with pytest.raises(ValueError, match=r"loss nan at step 3 on rank 0") as error:
        run_toy(tmp_path, parts, max_steps=20, save_every=5, log_every=5)
    assert len(seen) == 5  # nothing waits for the device before something is due
    assert str(error.value).endswith(f": {seen[2]}")
    assert Checkpoints(tmp_path, keep_last=2).newest()[0] is None


ASKING = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "nonzero")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls that would make the host wait for a device, in order."""
    called: list[str] = []

    def counted(name: str, plain: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            called.append(name)
            return plain(*arguments, **named)

        return call

    for name in ASKING:
        monkeypatch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
    return called


@pytest.mark.parametrize("precision", list(Precision)[1:])
def test_a_step_asks_the_device_for_nothing(precision: Precision, waits: list[str]):
    made = [micro_batch(number) for number in range(4)]
    parts = toy_parts(accumulation_steps=2, precision=precision, micro_batches=made.__getitem__)
    state, sums = TrainState(max_steps=9), MetricSums()
    watch = FiniteWatch(parts.device)
    waits.clear()
    for _ in range(2):
        step = optimizer_step(parts, state, OptimConfig(), sums, stop_requested=False)
        watch.add(state.step, step.loss, step.grad_norm, step.ids, scaled=parts.scaler.is_enabled())
    assert waits == []
    waits.clear()
    watch.require(parts)  # the control: here it does
    assert waits[0] == "tolist"


def test_half_precision_trains_float32_masters_and_keeps_its_scale(tmp_path: Path):
    parts = toy_parts(dropout=0.0, precision=Precision.fp16)
    before = weights(parts)
    take_steps(parts, 3)
    assert all(p.dtype is torch.float32 for p in parts.drafter.parameters())
    assert not torch.equal(before["head.weight"], weights(parts)["head.weight"])
    parts.scaler.update(512.0)
    save(
        Checkpoints(tmp_path, keep_last=1),
        parts,
        TrainState(max_steps=9, step=3),
        write_toy_drafter,
    )
    again = toy_parts(dropout=0.0, precision=Precision.fp16)
    assert resume(Checkpoints(tmp_path, keep_last=1), again, identity={}, say=str)
    assert again.scaler.get_scale() == 512.0


def test_a_half_precision_gradient_that_overflows_is_skipped_and_no_error():
    watch, parts = FiniteWatch(torch.device("cpu")), toy_parts(precision=Precision.fp16)
    watch.add(1, torch.tensor(1.0), torch.tensor(float("inf")), ["a"], scaled=True)
    watch.require(parts)
    watch.add(2, torch.tensor(1.0), torch.tensor(float("inf")), ["a"], scaled=False)
    with pytest.raises(ValueError, match="gradient norm inf at step 2"):
        watch.require(parts)


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("num_micro_batches", [1, 7, 12])
def test_every_micro_batch_counts_once_on_any_number_of_processes(
    processes: int, accumulation_steps: int, num_micro_batches: int
):
    steps = math.ceil(num_micro_batches / (processes * accumulation_steps))
    counted: list[int] = []
    for step in range(steps):
        state = TrainState(max_steps=steps, step=step, num_micro_batches=num_micro_batches)
        turns = []
        for rank in range(processes):
            accelerator = SimpleNamespace(num_processes=processes, process_index=rank)
            device = torch.device("cpu")
            parts = SimpleNamespace(
                accelerator=accelerator,
                accumulation_steps=accumulation_steps,
                micro_batches=lambda number: ToyBatch([str(number)], torch.zeros(2)),
                device=device,
            )
            turns.append(_own_turns(parts, state))  # type: ignore[arg-type]
        assert len({len(of_rank) for of_rank in turns}) == 1  # all meet in every backward pass
        counted += [int(turn.batch.ids[0]) for of_rank in turns for turn in of_rank if turn.counts]
    assert sorted(counted) == list(range(num_micro_batches))


def test_training_ends_early_after_measurements_without_a_better_one(tmp_path: Path):
    state = run_toy(tmp_path, toy_parts(), max_steps=300, patience=2, score=lambda parts: 1.0)
    assert (state.step, state.num_worse, state.ended_early) == (45, 2, True)
    again = run_toy(tmp_path, toy_parts(), max_steps=300, patience=2, score=lambda parts: 2.0)
    assert again.step == 45  # it stays ended


def test_measurements_say_what_share_of_the_time_they_take(tmp_path: Path):
    run_toy(tmp_path, toy_parts(), max_steps=30)
    records = [record for record in read_metrics(tmp_path) if record["kind"] == "acceptance"]
    assert [record["step"] for record in records] == [15, 30]
    assert all(0 < record["share_of_time"] < 1 for record in records)
    training = [record for record in read_metrics(tmp_path) if record["kind"] == "training"]
    assert all(record["positions_per_s"] > record["tokens_per_s"] > 0 for record in training)
    assert all(record["peak_memory_gib"] > 0 for record in training)


def gloo_worker(rank: int, port: int, out: Path, case: "Case") -> None:
    """20 steps as one of several ranks, with a stop and a restart in the middle."""
    if case.processes > 1:
        as_rank(rank, port, case.processes)
    if case.zero_stage:
        os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true"}
        os.environ |= {"ACCELERATE_DEEPSPEED_ZERO_STAGE": str(case.zero_stage)}
        leave_out_compiled_operators()
    if case.sharded:
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        os.environ |= {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}
        os.environ |= {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    checkpoints = Checkpoints(out.with_suffix(".run"), keep_last=1)
    state = TrainState(max_steps=20, processes=case.processes, num_micro_batches=NUM_MICRO_BATCHES)
    steps: list[tuple[float, float | None, float]] = []
    taken: list[str] = []
    for _ in range(2):
        parts = toy_parts(
            dropout=0.0,
            accumulation_steps=case.accumulation_steps,
            objective=counting_some,
            micro_batches=numbered,
        )
        assert parts.accelerator.num_processes == case.processes
        assert is_fsdp(parts.accelerator) == case.sharded
        assert is_zero(parts.accelerator) == bool(case.zero_stage)
        state = resume(checkpoints, parts, identity={}, say=str) or state
        for _ in range(10):
            sums = MetricSums()
            step = optimizer_step(parts, state, STEADY, sums, stop_requested=False)
            ratios = sums.reduce(parts.accelerator)
            steps.append((ratios["loss"], ratios.get("some"), step.learning_rate))
            taken += [name for ids in from_all(parts.accelerator, step.ids) for name in ids]
        save(checkpoints, parts, state, write_toy_drafter)
    if rank == 0:
        out.write_text(json.dumps({"steps": steps, "taken": taken}))


def numbered(number: int) -> ToyBatch:
    return replace(micro_batch(number), ids=[str(number)])


def counting_some(drafter: nn.Module, batch: ToyBatch) -> ToyTerms:
    """Something is counted in every fifth batch only."""
    terms = cross_entropy(drafter, batch)
    if int(batch.ids[0]) % 5 == 0:
        terms.counts["some"] = (torch.tensor(int(batch.ids[0])), torch.tensor(batch.num_tokens))
    return terms


@dataclass(frozen=True)
class Case:
    processes: int
    accumulation_steps: int
    sharded: bool = False
    zero_stage: int = 0


STEADY = OptimConfig(learning_rate=6e-4)
NUM_MICRO_BATCHES = 77  # of 20 steps of 4: the data ends with a batch for one process alone
CASES = (Case(1, 4), Case(2, 2), Case(4, 1), Case(2, 2, sharded=True))


@dataclass(frozen=True)
class End:
    """What a run came to."""

    losses: list[float]  # of every step
    some: list[float | None]  # what is not counted in every batch
    rates: list[float]
    taken: list[str]  # micro-batches by number
    saved: dict[str, torch.Tensor]  # weights and moments of the last checkpoint


def run_processes(out: Path, case: Case) -> End:
    with free_port() as port:
        ranks = range(case.processes)
        codes = exit_codes([forked(gloo_worker, rank, port, out, case) for rank in ranks])
    assert codes == [0] * case.processes
    newest, _ = Checkpoints(out.with_suffix(".run"), keep_last=1).newest()
    assert newest is not None
    moments = load_file(newest.folder / OPTIMIZER)
    saved = {k: v.float() for k, v in moments.items() if k.startswith("optimizer.")}
    found = json.loads(out.read_text())
    losses, some, rates = zip(*found["steps"], strict=True)
    return End(
        [*losses], [*some], [*rates], found["taken"], load_file(newest.folder / WEIGHTS) | saved
    )


def require_same_steps(folder: Path, cases: Sequence[Case]) -> None:
    """That all of them take every batch once and end with the losses, rates, weights and moments of
    the first one."""
    ends = [run_processes(folder / f"{number}.json", case) for number, case in enumerate(cases)]
    first = ends[0]
    assert len(first.losses) == 20
    assert first.rates[-1] == pytest.approx(STEADY.learning_rate * STEADY.final_fraction)
    for end in ends:
        assert sorted(map(int, end.taken)) == list(range(NUM_MICRO_BATCHES))
        assert (end.some, end.rates) == (first.some, first.rates)
        assert end.losses == pytest.approx(first.losses, abs=SAME_STEP)
        assert end.saved.keys() == first.saved.keys()  # whole tensors under plain names
        for name, values in first.saved.items():
            assert (values - end.saved[name]).abs().max() <= SAME_STEP, name


def test_any_number_of_processes_sharded_or_not_takes_the_same_steps(tmp_path: Path):
    require_same_steps(tmp_path, CASES)


def leave_out_compiled_operators() -> None:
    """DeepSpeed compiles its communication between CPUs for a minute; gloo does without."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


@pytest.mark.slow
def test_every_stage_of_zero_takes_the_same_steps_and_continues(tmp_path: Path):
    pytest.importorskip("deepspeed")
    stages = [Case(2, 2, zero_stage=stage) for stage in (1, 2, 3)]
    require_same_steps(tmp_path, [Case(2, 2), *stages])


@pytest.mark.parametrize(
    ("settings", "precision", "says"),
    [
        ({"stage": 0}, Precision.fp32, "zero_stage is 0, expected 1, 2 or 3"),
        (
            {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            Precision.fp32,
            "is cpu, expected none",
        ),
        ({"stage": 2}, Precision.fp16, "training.precision=fp16 does not go with DeepSpeed"),
    ],
)
def test_what_was_never_run_with_deepspeed_is_refused(
    settings: dict[str, object], precision: Precision, says: str
):
    with pytest.raises(ValueError, match=says):
        check_zero({"zero_optimization": settings}, precision)
