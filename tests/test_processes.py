"""Many processes: what the main one meets reaches all, and the ready-made configurations are valid."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from train import processes
from train.processes import on_main
from train.sharding import is_sharding

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


def test_the_ready_made_configurations_are_accelerates_own():
    found = {path.stem: load_config_from_file(str(path)) for path in CONFIGS}
    assert {name: config.num_processes for name, config in found.items()} == {
        "1gpu": 1,
        "8gpu": 8,
        "8gpu_fsdp2": 8,
        "2x8gpu": 16,
    }
    assert found["8gpu_fsdp2"].fsdp_config["fsdp_version"] == 2
    assert found["2x8gpu"].num_machines == 2
    # training.precision decides: with accelerate's own, losses would be scaled twice
    assert {config.mixed_precision for config in found.values()} == {"no"}


def test_fsdp_of_the_first_version_is_refused():
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=False)
    with pytest.raises(ValueError, match="fsdp_version: 2"):
        is_sharding(accelerator)  # type: ignore[arg-type]
