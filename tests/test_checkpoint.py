"""Checkpoints: complete or invisible, and a resumed run equals the uninterrupted one bit for bit."""

import json
import os
import random
import resource
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.toy_training import (
    ToyBatch,
    ToyTerms,
    as_rank,
    cross_entropy,
    exit_codes,
    forked,
    micro_batch,
    ran_by_two,
    run_toy,
    toy_parts,
    weights,
    write_toy_drafter,
)
from train.checkpoint import MANIFEST, OPTIMIZER, WEIGHTS, Checkpoints, TrainState
from train.interrupts import Interrupted, StopRequest
from train.rng import seed_everything
from train.run_log import read_metrics
from train.session import resume, save


@dataclass(frozen=True)
class Case:
    """A run, and where SIGKILL ends its sessions: (place, number of the micro-batch or step)."""

    accumulation_steps: int
    epoch_batches: int
    max_steps: int
    save_every: int
    kills: tuple[tuple[str, int], ...]


CASES = [
    # Case I1: in an epoch, before its last step, in it, in the next epoch; the run goes on into a third.
    Case(1, 125, 260, 30, (("batch", 37), ("batch", 124), ("batch", 125), ("batch", 200))),
    # In the middle of a step and while saving. Epochs end inside steps: 125 is the first batch of step
    # 32 and the last one of an epoch, 126 the second of that step and the first of the next epoch.
    Case(
        4,
        125,
        66,
        6,
        (("batch", 38), ("saving", 18), ("batch", 125), ("batch", 126), ("batch", 203)),
    ),
]


def session(run_dir: Path, case: Case, kill: tuple[str, int] | None) -> None:
    """One process of a run."""
    where, number = kill or ("never", 0)
    found, _ = Checkpoints(run_dir, keep_last=2).newest()
    batches_done = (found.state.step if found else 0) * case.accumulation_steps
    trace = (run_dir / "trace.jsonl").open("a")

    def batch_of_epoch(index: int) -> ToyBatch:
        """The ids name epoch and place, the content follows the place."""
        epoch, index = divmod(index, case.epoch_batches)
        order = torch.randperm(case.epoch_batches, generator=torch.Generator().manual_seed(epoch))
        place = int(order[index])
        return ToyBatch([f"{epoch}-{place}"], micro_batch(place).token_ids)

    def objective(drafter: nn.Module, batch: ToyBatch) -> ToyTerms:
        nonlocal batches_done
        batches_done += 1
        if where == "batch" and batches_done == number:
            os.kill(os.getpid(), signal.SIGKILL)
        terms = cross_entropy(drafter, batch)
        trace.write(json.dumps([batches_done, batch.ids, terms.loss_sum.item().hex()]) + "\n")
        trace.flush()
        return terms

    def write_drafter(folder: Path) -> None:
        if where == "saving" and f"step-{number:08d}" in str(folder):
            os.kill(os.getpid(), signal.SIGKILL)
        write_toy_drafter(folder)

    parts = toy_parts(
        accumulation_steps=case.accumulation_steps,
        objective=objective,
        micro_batches=batch_of_epoch,
    )
    run_toy(
        run_dir,
        parts,
        max_steps=case.max_steps,
        save_every=case.save_every,
        write_drafter=write_drafter,
    )


def in_process(function: Callable[..., None], *arguments: object) -> int | None:
    return exit_codes([forked(function, *arguments)])[0]


def trace_of(run_dir: Path) -> dict[int, tuple]:
    """Micro-batch number -> (ids, exact loss); what is done twice must come out twice the same."""
    trace: dict[int, tuple] = {}
    for line in (run_dir / "trace.jsonl").read_text().splitlines():
        number, ids, loss = json.loads(line)
        assert trace.setdefault(number, (ids, loss)) == (ids, loss), number
    return trace


@pytest.mark.parametrize("case", CASES, ids=["every step", "accumulated"])
def test_a_killed_and_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, case: Case):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    assert in_process(session, whole, case, None) == 0
    for kill in case.kills:
        assert in_process(session, killed, case, kill) == -signal.SIGKILL
    assert in_process(session, killed, case, None) == 0

    assert trace_of(killed) == trace_of(whole)
    assert len(trace_of(whole)) == case.max_steps * case.accumulation_steps
    ends = [Checkpoints(folder, keep_last=2).newest()[0] for folder in (whole, killed)]
    assert ends[0] is not None
    assert ends[1] is not None
    for file in (WEIGHTS, OPTIMIZER):
        first, second = (load_file(end.folder / file) for end in ends)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
    for field in ("step", "num_tokens", "best_step", "best_score", "first_score"):
        assert getattr(ends[0].state, field) == getattr(ends[1].state, field)
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (whole, killed)]
    steps = [[(r["kind"], r["step"]) for r in map(json.loads, text)] for text in lines]
    assert steps[0] == steps[1]


def stopped_and_continued(rank: int, port: int, folder: Path) -> None:
    """An undisturbed run of two processes, and one that a signal to the second of them stops."""
    as_rank(rank, port)
    for name, stop_at in (("whole", 0), ("stopped", 4), ("stopped", 0)):
        taken: list[ToyBatch] = []

        def objective(
            drafter: nn.Module, batch: ToyBatch, *, taken: list = taken, stop_at: int = stop_at
        ) -> ToyTerms:
            taken.append(batch)
            if rank == 1 and len(taken) == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return cross_entropy(drafter, batch)

        parts = toy_parts(objective=objective)
        seed_everything(3, rank)  # other dropout on each
        expected = pytest.raises(Interrupted) if stop_at else nullcontext()
        with StopRequest() as stop, expected as stopped:
            run_toy(folder / name, parts, max_steps=8, save_every=100, stop=stop)
        if stopped is not None:
            assert stopped.value.signum == signal.SIGTERM  # on both
            assert len(taken) < 8


def test_a_signal_to_one_process_stops_all_and_each_goes_on_with_its_random_state(tmp_path: Path):
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    assert ran_by_two(stopped_and_continued, tmp_path) == [0, 0]
    ends = [Checkpoints(tmp_path / n, keep_last=2).newest()[0] for n in ("whole", "stopped")]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].state.step == ends[1].state.step == 8
    for file in (WEIGHTS, OPTIMIZER):
        first, second = (load_file(end.folder / file) for end in ends)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["rng.0.cpu"], first["rng.1.cpu"])
    losses = [[r.get("loss") for r in read_metrics(tmp_path / n)] for n in ("whole", "stopped")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 9  # of each step, once, and a measurement


def saved_run(run_dir: Path, steps: int = 6) -> Checkpoints:
    run_toy(run_dir, toy_parts(), max_steps=steps, save_every=2)
    return Checkpoints(run_dir, keep_last=2)


@pytest.mark.parametrize("damage", ["half", "missing", "no manifest", "changed"])
def test_a_damaged_newest_checkpoint_is_passed_over_and_named(tmp_path: Path, damage: str):
    checkpoints = saved_run(tmp_path)
    newest = checkpoints.root / "step-00000006"
    weights_file = newest / WEIGHTS
    if damage == "half":
        weights_file.write_bytes(weights_file.read_bytes()[: weights_file.stat().st_size // 2])
    elif damage == "changed":
        content = bytearray(weights_file.read_bytes())
        content[-1] ^= 1
        weights_file.write_bytes(bytes(content))
    else:
        (newest / (MANIFEST if damage == "no manifest" else "drafter/config.json")).unlink()

    said: list[str] = []
    state = resume(checkpoints, toy_parts(), identity={"data": "toy"}, say=said.append)

    assert state is not None
    assert state.step == 4
    assert "step-00000006" in said[0]
    assert "it is passed over" in said[0]
    assert said[1].startswith("continuing after step 4")


def test_without_a_good_checkpoint_training_says_that_it_starts_again(tmp_path: Path):
    checkpoints, said = saved_run(tmp_path), []
    for manifest in checkpoints.root.glob(f"*/{MANIFEST}"):
        manifest.unlink()
    assert resume(checkpoints, toy_parts(), identity={"data": "toy"}, say=said.append) is None
    assert said[-1] == "no complete checkpoint is left: training starts from its beginning"
    assert len(said) > 1


def test_a_save_that_fails_half_way_leaves_the_previous_checkpoint(tmp_path: Path):
    def disk_full(folder: Path) -> None:
        if "00000004" in str(folder):
            raise OSError("No space left on device")
        write_toy_drafter(folder)

    with pytest.raises(OSError, match="No space"):
        run_toy(tmp_path, toy_parts(), max_steps=6, save_every=2, write_drafter=disk_full)
    checkpoint, passed_over = Checkpoints(tmp_path, keep_last=2).newest()
    assert checkpoint is not None
    assert (checkpoint.state.step, passed_over) == (2, [])


def fill_the_disk(run_dir: Path) -> None:
    """A session whose files may not grow beyond two kilobytes from its third step on."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails, as on a full disk
    steps = 0

    def objective(drafter: nn.Module, batch: ToyBatch) -> ToyTerms:
        nonlocal steps
        steps += 1
        if steps == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        return cross_entropy(drafter, batch)

    with pytest.raises(OSError, match=r"step-00000004 could not be written"):
        run_toy(run_dir, toy_parts(objective=objective), max_steps=6, save_every=2)


def test_a_full_disk_keeps_the_previous_checkpoint_and_the_metrics(tmp_path: Path):
    assert in_process(fill_the_disk, tmp_path) == 0
    checkpoint, passed_over = Checkpoints(tmp_path, keep_last=2).newest()
    assert checkpoint is not None
    assert (checkpoint.state.step, passed_over) == (2, [])
    steps = [record["step"] for record in read_metrics(tmp_path)]
    assert steps[:2] == [1, 2]
    assert run_toy(tmp_path, toy_parts(), max_steps=6, save_every=2).step == 6  # with room again


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path):
    parts = toy_parts()
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    state = TrainState(max_steps=9)
    for step in range(1, 8):
        state.step = step
        state.is_best({3: 2.0}.get(step, 1.0))
        save(checkpoints, parts, state, write_toy_drafter)
    kept = sorted(path.name for path in checkpoints.root.iterdir())
    assert kept == ["step-00000003", "step-00000006", "step-00000007"]
    assert (tmp_path / "best").resolve().name == "step-00000003"
    assert (tmp_path / "best" / "drafter" / "config.json").is_file()


def test_a_worse_drafter_after_resume_does_not_replace_the_best(tmp_path: Path):
    state = TrainState(max_steps=9, step=4)
    assert state.is_best(1.7)
    save(Checkpoints(tmp_path, keep_last=2), toy_parts(), state, write_toy_drafter)
    again = resume(Checkpoints(tmp_path, keep_last=2), toy_parts(), identity={}, say=str)
    assert again is not None
    again.step = 5
    assert not again.is_best(1.6)
    assert (again.best_step, again.best_score) == (4, 1.7)


def test_moments_step_count_and_rate_come_back(tmp_path: Path):
    first = toy_parts()
    run_toy(tmp_path, first, max_steps=5)
    second = toy_parts()
    resume(Checkpoints(tmp_path, keep_last=2), second, identity={"data": "toy"}, say=str)
    assert first.updates.param_groups() == second.updates.param_groups()
    one, two = first.updates.moments(), second.updates.moments()
    assert {name.rpartition(".")[2] for name in one} == {"step", "exp_avg", "exp_avg_sq"}
    assert one.keys() == two.keys()
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert all(torch.equal(v, weights(second)[k]) for k, v in weights(first).items())


@pytest.mark.parametrize("is_compiled", [(True, False), (False, True)], ids=["before", "behind"])
def test_keys_carry_no_wrapper_prefix_whether_compiled_or_not(
    tmp_path: Path, is_compiled: tuple[bool, bool]
):
    first, second = toy_parts(), toy_parts()
    for parts, compiled in zip((first, second), is_compiled, strict=True):
        if compiled:
            parts.drafter.compile(backend="eager")
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    with torch.no_grad():
        first.drafter.head.bias.fill_(0.25)
    save(checkpoints, first, TrainState(max_steps=1), write_toy_drafter)
    saved = load_file(tmp_path / "checkpoints" / "step-00000000" / WEIGHTS)
    assert set(saved) == {"embed.weight", "head.weight", "head.bias"}
    assert resume(checkpoints, second, identity={}, say=str)
    assert all(torch.equal(v, weights(first)[k]) for k, v in weights(second).items())


def test_every_random_state_comes_back(tmp_path: Path):
    parts, checkpoints = toy_parts(), Checkpoints(tmp_path, keep_last=1)

    def drawn() -> tuple[float, float, float, float]:
        of_numpy = float(np.random.standard_normal())  # keeps a second number for the next call
        return random.random(), random.gauss(0, 1), of_numpy, float(torch.rand(()))

    drawn()
    save(checkpoints, parts, TrainState(max_steps=9), write_toy_drafter)
    expected = drawn()
    again = toy_parts()  # seeds anew
    assert drawn() != expected
    assert resume(checkpoints, again, identity={}, say=str)
    assert drawn() == expected


def test_another_target_data_set_or_process_count_is_refused(tmp_path: Path):
    checkpoints = saved_run(tmp_path)
    with pytest.raises(ValueError, match="data is other here and was toy"):
        resume(checkpoints, toy_parts(), identity={"data": "other"}, say=str)
    parts = toy_parts()
    state = TrainState(max_steps=9, step=9, processes=2, identity={"data": "toy"})
    save(checkpoints, parts, state, write_toy_drafter)
    with pytest.raises(ValueError, match="2 processes and would continue with 1"):
        resume(checkpoints, parts, identity={"data": "toy"}, say=str)


def test_a_frozen_weight_is_neither_saved_nor_asked_for(tmp_path: Path):
    parts = toy_parts()
    parts.drafter.embed.weight.requires_grad_(False)
    save(Checkpoints(tmp_path, keep_last=1), parts, TrainState(max_steps=1), write_toy_drafter)
    saved = load_file(tmp_path / "checkpoints" / "step-00000000" / WEIGHTS)
    assert set(saved) == {"head.weight", "head.bias"}


def test_nothing_in_a_checkpoint_is_pickled(tmp_path: Path):
    checkpoints = saved_run(tmp_path)
    suffixes = {path.suffix for path in checkpoints.root.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors"}
