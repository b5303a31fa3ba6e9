"""The metrics log: one line a record, whole after a kill, and W&B that never asks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from train.run_log import RunLog, Tracker, TrackingConfig, check_tracker, read_metrics
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


SCRIPT = """
import sys
from pathlib import Path
from train.run_log import Input, RunLog, Tracker, TrackingConfig
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
                  summary={"acceptance_length": 1.5})
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
        timeout=240,  # on a machine that does other things as well
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
    for name in (b"training/by_position_1", b"acceptance/samples", b"evaluation/report"):
        assert name in stored, name
    for name in (b"-drafter", b"-evaluation", b"target_fingerprint", b"f" * 64, b"draftloop.json"):
        assert name in stored, name


def test_samples_are_escaped_and_coloured_by_what_became_of_a_token():
    page = as_html(Sample("why?", [("<b>", "accepted"), ("no", "recovered")]))
    assert "&lt;b&gt;" in page
    assert page.count(COLOURS["accepted"]) == 2  # the token and the legend
    assert page.count(COLOURS["bonus"]) == 1


def test_a_tracker_that_is_not_installed_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
):
    check_tracker(TrackingConfig(tracker=Tracker.none))
    monkeypatch.setattr("train.run_log.find_spec", lambda name: None)
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
