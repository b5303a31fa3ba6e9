"""The metrics log: one line a record, whole after a kill, and W&B that never asks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from train.run_log import RunLog, Tracker, TrackingConfig, read_metrics


def make_log(folder: Path, *, is_main: bool = True, resumed_step: int | None = None) -> RunLog:
    return RunLog(
        folder, TrackingConfig(), is_main=is_main, name="toy", config={}, resumed_step=resumed_step
    )


def test_records_come_back_as_written_and_nan_as_null(tmp_path: Path):
    log = make_log(tmp_path)
    log.write("training", 1, {"loss": 1.5, "rate": float("nan"), "by_position": [0.5, 0.25]})
    log.finish(exit_code=0)
    (record,) = read_metrics(tmp_path)
    assert (record["kind"], record["step"], record["loss"]) == ("training", 1, 1.5)
    assert record["rate"] is None
    assert record["by_position"] == [0.5, 0.25]


def test_other_processes_write_nothing_and_may_still_log(tmp_path: Path):
    log = make_log(tmp_path, is_main=False)
    log.write("training", 1, {"loss": 1.0})
    log.finish(exit_code=0)
    assert list(tmp_path.iterdir()) == []


def test_lines_after_the_resumed_step_and_torn_ones_are_dropped(tmp_path: Path):
    log = make_log(tmp_path)
    for step in (1, 2, 3):
        log.write("training", step, {"loss": float(step)})
    log.finish(exit_code=0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "trai')  # killed while writing
    log = make_log(tmp_path, resumed_step=2)
    log.write("training", 3, {"loss": 30.0})
    log.finish(exit_code=0)
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 30)]


SCRIPT = """
import sys
from pathlib import Path
from train.run_log import RunLog, Tracker, TrackingConfig
tracking = TrackingConfig(tracker=Tracker[sys.argv[2]])
log = RunLog(Path(sys.argv[1]), tracking, is_main=True, name="toy", config={"lr": 0.1})
log.write("training", 1, {"loss": 1.0, "by_position": [0.5]})
log.finish(exit_code=0, summary={"acceptance_length": 1.5})
print("wandb" in sys.modules)
"""


def run_script(folder: Path, tracker: Tracker, mode: str | None) -> bool:
    """In a process without key, terminal or home; returns whether wandb was imported."""
    hidden = {"WANDB_MODE", "WANDB_API_KEY", "NETRC"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HOME": str(folder)} | ({"WANDB_MODE": mode} if mode else {})
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), tracker.value],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1] == "True"


@pytest.mark.parametrize(
    ("tracker", "mode"), [(Tracker.none, None), (Tracker.wandb, "disabled")], ids=["none", "off"]
)
def test_wandb_that_is_off_is_not_imported(tmp_path: Path, tracker: Tracker, mode: str | None):
    assert not run_script(tmp_path, tracker, mode)


def test_wandb_without_a_key_runs_offline_and_asks_nothing(tmp_path: Path):
    assert run_script(tmp_path, Tracker.wandb, None)
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1
