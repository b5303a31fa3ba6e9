"""The training loop: what a step computes, how it stops, and that processes do not change it."""

import json
import multiprocessing
import os
import signal
import socket
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from tests.toy_training import (
    PRELOADED,
    ToyBatch,
    ToyDrafter,
    ToyTerms,
    cross_entropy,
    micro_batch,
    run_toy,
    toy_parts,
    weights,
)
from train.checkpoint import Checkpoints, TrainState
from train.interrupts import Interrupted, StopRequest
from train.loop import Parts, measured_step_s, optimizer_step, steps_in
from train.metrics import MetricSums
from train.optim import OptimConfig, Schedule, learning_rate_at, make_optimizer
from train.rng import capture_rng, seed_everything
from train.run_log import read_metrics

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

    assert step.grad_norm == pytest.approx(float(expected), abs=SAME_STEP)


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


def test_small_updates_arrive_in_the_masters():
    parts = toy_parts(dropout=0.0)
    before = weights(parts)
    state, optim = TrainState(max_steps=1000), OptimConfig(learning_rate=1e-6)
    for _ in range(20):
        optimizer_step(parts, state, optim, MetricSums(), stop_requested=False)
    assert not torch.equal(before["head.weight"], parts.drafter.state_dict()["head.weight"])


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


def gloo_worker(rank: int, port: int, out: Path, accumulation_steps: int, processes: int) -> None:
    """20 steps as one of `processes` ranks; rank 0 writes the weights."""
    torch.set_num_threads(1)
    if processes > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    parts = toy_parts(dropout=0.0, accumulation_steps=accumulation_steps)
    assert parts.accelerator.num_processes == processes
    loss = take_steps(parts, 20).reduce(parts.accelerator)["loss"]
    if rank == 0:
        values = {name: value.tolist() for name, value in weights(parts).items()}
        out.write_text(json.dumps({"loss": loss, "weights": values}))


def run_processes(out: Path, *, processes: int, accumulation_steps: int) -> dict:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = [
        context.Process(target=gloo_worker, args=(rank, port, out, accumulation_steps, processes))
        for rank in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * processes
    return json.loads(out.read_text())


def test_two_processes_take_the_same_steps_as_one_with_twice_the_accumulation(tmp_path: Path):
    two = run_processes(tmp_path / "two.json", processes=2, accumulation_steps=2)
    one = run_processes(tmp_path / "one.json", processes=1, accumulation_steps=4)
    assert two["loss"] == pytest.approx(one["loss"], abs=SAME_STEP)
    for name, values in one["weights"].items():
        difference = (torch.tensor(values) - torch.tensor(two["weights"][name])).abs().max()
        assert difference <= SAME_STEP, name
