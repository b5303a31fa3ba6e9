"""Many processes: what the main one meets reaches all, and the ready-made configurations are valid."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn

from tests.test_config import composed
from tests.toy_training import (
    ToyBatch,
    ToyTerms,
    cross_entropy,
    exit_codes,
    forked,
    free_port,
    run_toy,
    toy_parts,
)
from train import processes
from train import run as run_module
from train.checkpoint import Checkpoints
from train.job import Job
from train.processes import check_accelerate, on_main
from train.run import RunResult, check_shares
from train.sharding import is_fsdp

CONFIGS = sorted((Path(__file__).parent.parent / "conf" / "accelerate").glob("*.yaml"))


def of_rank(rank: int) -> SimpleNamespace:
    return SimpleNamespace(num_processes=2, is_main_process=rank == 0)


@pytest.mark.parametrize("error", [ValueError, OSError, RuntimeError])
def test_an_error_of_the_main_process_is_raised_on_every_one(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    sent: list[list[object]] = []

    def broadcast(outcome: list[object]) -> None:
        if sent:
            outcome[:] = sent[0]
        sent.append(list(outcome))

    def fails() -> None:
        raise error("the disk is full")

    monkeypatch.setattr(processes, "broadcast_object_list", broadcast)
    for rank in (0, 1):  # rank 1 does not run the function, and does not wait for it either
        with pytest.raises(error, match="the disk is full"):
            on_main(of_rank(rank), fails)  # type: ignore[arg-type]


def as_rank(rank: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def ran(worker: Callable[..., None], *arguments: object) -> list[int | None]:
    """Exit codes of two ranks of a worker."""
    with free_port() as port:
        return exit_codes([forked(worker, rank, port, *arguments) for rank in (0, 1)])


def crashing(rank: int, port: int, run_dir: Path) -> None:
    """Trains a toy; rank 1 dies in its third step, without a word to rank 0."""
    as_rank(rank, port)

    def objective(drafter: nn.Module, batch: ToyBatch) -> ToyTerms:
        taken.append(batch)
        if rank == 1 and len(taken) == 3:
            os._exit(9)
        return cross_entropy(drafter, batch)

    taken: list[ToyBatch] = []
    run_toy(run_dir, toy_parts(objective=objective), max_steps=6)


def test_a_rank_that_dies_takes_the_other_with_it_and_leaves_a_good_checkpoint(tmp_path: Path):
    codes = ran(crashing, tmp_path)
    assert codes[1] == 9
    assert codes[0] not in (0, None)  # None: it would still be waiting
    newest, damaged = Checkpoints(tmp_path, keep_last=2).newest()
    assert newest is None or newest.state.step < 3
    assert damaged == []


def starting(rank: int, port: int, runs_dir: Path) -> None:
    """Opens a run as `python -m train` does; rank 1 is a second late."""
    as_rank(rank, port)

    def stages(job: Job) -> RunResult:
        job.log.write("training", 1, {"loss": 1.0})
        (runs_dir / f"seen-by-{rank}").write_text(str(job.run_dir))
        return RunResult(1.0, True, job.run_dir)

    run_module._run_stages = stages
    time.sleep(1.1 * rank)
    config = composed("+experiment=smoke", f"runs_dir={runs_dir / 'runs'}", "target.device=cpu")
    run_module.run(config, "seed: 0\n", ["train"])


def test_all_ranks_share_one_run_folder_even_if_they_start_in_other_seconds(tmp_path: Path):
    assert ran(starting, tmp_path) == [0, 0]
    (folder,) = (tmp_path / "runs" / "smoke").iterdir()
    assert {path.read_text() for path in tmp_path.glob("seen-by-*")} == {str(folder)}
    names = [path.name for path in folder.iterdir()]
    assert names.count("config.yaml") == 1
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1  # rank 0's alone


def test_the_ready_made_configurations_are_accelerates_own():
    found = {path.stem: load_config_from_file(str(path)) for path in CONFIGS}
    assert {name: config.num_processes for name, config in found.items()} == {
        "1gpu": 1,
        "8gpu": 8,
        "8gpu_fsdp2": 8,
        "8gpu_zero": 8,
        "2x8gpu": 16,
    }
    assert found["8gpu_fsdp2"].fsdp_config["fsdp_version"] == 2
    assert found["8gpu_zero"].deepspeed_config["zero_stage"] == 2
    assert found["2x8gpu"].num_machines == 2
    # training.precision decides: with accelerate's own, losses would be scaled twice
    assert {config.mixed_precision for config in found.values()} == {"no"}


@pytest.mark.parametrize(
    ("setting", "own"),
    [
        ({"mixed_precision": "fp16"}, "training.precision"),
        ({"gradient_accumulation_steps": 4}, "training.accumulation_steps"),
        ({"backend": DynamoBackend.INDUCTOR}, "training.compile"),
    ],
)
def test_settings_of_accelerate_that_ours_stand_for_are_refused(setting: dict[str, Any], own: str):
    def accelerator(
        *,
        mixed_precision: str = "no",
        gradient_accumulation_steps: int = 1,
        backend: DynamoBackend = DynamoBackend.NO,
    ) -> Any:
        state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=backend))
        return SimpleNamespace(
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            state=state,
        )

    check_accelerate(accelerator())
    check_accelerate(Accelerator(cpu=True))
    with pytest.raises(ValueError, match=f"{own} decides about that here"):
        check_accelerate(accelerator(**setting))


@pytest.mark.parametrize("setting", ["training.compile=true", "on_policy.fraction=0.5"])
def test_what_needs_the_whole_drafter_is_refused_where_weights_are_shared_out(setting: str):
    config = composed("+experiment=smoke", setting)
    fsdp = SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=True)
    ddp = SimpleNamespace(distributed_type=DistributedType.MULTI_GPU)
    check_shares(config, ddp)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{setting.split('=')[0]}=.* does not go with FSDP2"):
        check_shares(config, fsdp)  # type: ignore[arg-type]


def test_fsdp_of_the_first_version_is_refused():
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=False)
    with pytest.raises(ValueError, match="fsdp_version: 2"):
        is_fsdp(accelerator)  # type: ignore[arg-type]
