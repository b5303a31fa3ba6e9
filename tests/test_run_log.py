"""The metrics log: one line a record, whole after a kill, and W&B that never asks."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from eval.trackers import Tracker, Trackers, TrackingConfig, check_tracker
from train.run_log import RunLog, read_metrics
from train.samples import COLOURS, Sample, as_html


def make_log(folder: Path, *, is_main: bool = True) -> RunLog:
    return RunLog(folder, TrackingConfig(), is_main=is_main, name="toy", config={})


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
    log = make_log(tmp_path)
    log.continue_after(2)
    log.write("training", 3, {"loss": 30.0})
    log.finish(exit_code=0)
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 30)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file of Linux")
def test_a_full_disk_is_said_once_and_the_tracker_is_told(tmp_path: Path, monkeypatch):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log, told = make_log(tmp_path), []
    monkeypatch.setattr(Trackers, "finish", lambda self, **named: told.append(named["exit_code"]))
    with pytest.raises(OSError, match=r"metrics\.jsonl could not be written.*No space left"):
        log.write("training", 1, {"loss": 1.0})
    log.finish(exit_code=1)
    assert told == [1]


SCRIPT = """
import sys
from pathlib import Path
from eval.trackers import Input, Rows, Tracker, TrackingConfig
from train.run_log import RunLog
from train.samples import Sample
run_dir, tracking = Path(sys.argv[1]), TrackingConfig(tracker=Tracker[sys.argv[2]])
log = RunLog(run_dir, tracking, is_main=True, name="toy", config={"lr": 0.1})
log.write("training", 1, {"loss": 1.0, "by_position": [0.5]})
log.write_samples(1, [Sample("why?", [("be", "accepted"), ("<cause>", "recovered")])])
for folder, file in (("drafter", "draftloop.json"), ("eval", "report.html")):
    (run_dir / folder).mkdir()
    (run_dir / folder / file).write_text("content of " + file)
inputs = [Input("target", "toy/model", "f" * 64), Input("dataset", "answers", "a" * 64)]
log.write_results(drafter=run_dir / "drafter", evaluation=run_dir / "eval", inputs=inputs,
                  summary={"acceptance_length": 1.5},
                  tables={"speedup": Rows(["drafter", "value"], [["toy", 1.2]])})
log.finish(exit_code=0, summary={"acceptance_length": 1.5})
print("wandb" in sys.modules)
"""


def run_script(folder: Path, tracker: Tracker, mode: str | None) -> bool:
    """In a process without key, terminal or home; returns whether wandb was imported."""
    hidden = {"WANDB_MODE", "WANDB_API_KEY", "NETRC"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HOME": str(folder)} | ({"WANDB_MODE": mode} if mode else {})
    # Of W&B's own patience, which a machine that does other things as well can exhaust.
    environment |= {"WANDB_X_SERVICE_WAIT": "300", "WANDB_INIT_TIMEOUT": "300"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), tracker.value],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
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


def test_wandb_without_a_key_runs_offline_and_keeps_curves_samples_and_artifacts(tmp_path: Path):
    assert run_script(tmp_path, Tracker.wandb, None)
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (record,) = run.glob("*.wandb")
    stored = record.read_bytes()
    assert f"toy-{tmp_path.name}".encode() in stored  # the folder's name: a resumed run goes on
    for name in (
        b"training/by_position_1",
        b"acceptance/samples",
        b"evaluation/report",
        b"evaluation/speedup",
    ):
        assert name in stored, name
    for name in (b"-drafter", b"-evaluation", b"target_fingerprint", b"f" * 64, b"draftloop.json"):
        assert name in stored, name


class StandIn:
    """Takes the place of the wandb module and of its run; remembers what it is told."""

    offline = True

    def __init__(self) -> None:
        self.begun: list[dict] = []
        self.logged: list[tuple[int | None, dict]] = []
        self.ended: list[tuple[str, int]] = []  # (id, exit code)
        self.summary: dict = {}

    def init(self, **settings):
        self.begun.append(settings)
        return self

    def log(self, values, step=None):
        self.logged.append((step, values))

    def finish(self, exit_code):
        self.ended.append((self.begun[-1]["id"], exit_code))

    def Settings(self, **settings):
        return SimpleNamespace(base_url="https://localhost", **settings)


def test_a_resumed_run_goes_on_with_the_curves_of_the_same_wandb_run(tmp_path: Path, monkeypatch):
    wandb = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = tmp_path / "2026-11-30_00-00-00"
    run_dir.mkdir()
    tracking = TrackingConfig(tracker=Tracker.wandb)
    for first, last, resumed_from in ((1, 3, -1), (3, 4, 2)):  # killed after step 3, saved at 2
        log = RunLog(run_dir, tracking, is_main=True, name="toy", config={})
        log.continue_after(resumed_from)
        for step in range(first, last + 1):
            log.write("training", step, {"loss": 1.0 / step})
    other = RunLog(run_dir, tracking, is_main=False, name="toy", config={})
    other.write("training", 5, {"loss": 0.0})  # of another rank
    assert len(wandb.begun) == 2
    assert len({one["id"] for one in wandb.begun}) == 1
    assert all(one["resume"] == "allow" for one in wandb.begun)
    # Steps are said, so what was logged before the kill is said again and not appended.
    assert [step for step, _ in wandb.logged] == [1, 2, 3, 3, 4]
    assert wandb.logged[2] == wandb.logged[3]
    assert [record["step"] for record in read_metrics(run_dir)] == [1, 2, 3, 4]


def test_samples_are_escaped_and_coloured_by_what_became_of_a_token():
    page = as_html(Sample("why?", [("<b>", "accepted"), ("no", "recovered")]))
    assert "&lt;b&gt;" in page
    assert page.count(COLOURS["accepted"]) == 2  # the token and the legend
    assert page.count(COLOURS["bonus"]) == 1


def test_a_tracker_that_is_not_installed_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
):
    check_tracker(TrackingConfig(tracker=Tracker.none))
    monkeypatch.setattr("eval.trackers.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        check_tracker(TrackingConfig(tracker=Tracker.tensorboard))


def test_tensorboard_gets_the_same_curves(tmp_path: Path):
    pytest.importorskip("tensorboard")
    log = RunLog(
        tmp_path, TrackingConfig(tracker=Tracker.tensorboard), is_main=True, name="toy", config={}
    )
    log.write("training", 1, {"loss": 1.0, "by_position": [0.5]})
    log.finish(exit_code=0)
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"training/by_position_1" in events.read_bytes()
