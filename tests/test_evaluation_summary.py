"""What a run keeps of its evaluation."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from eval.config import EvalConfig
from eval.report import write_report
from eval.session import track
from eval.summary import summary_of, tables_of
from eval.trackers import Tracker, TrackingConfig
from tests.test_report import sample_results


def test_tables_of_a_tracker_are_rectangular_and_hold_every_drafter():
    results = sample_results()
    tables = tables_of(results)
    for name, rows in tables.items():
        assert rows.data, name
        assert {len(row) for row in rows.data} == {len(rows.columns)}, name
    assert {row[0] for row in tables["speedup"].data} == {"distilled", "lookup"}
    # Three positions of two drafters on two suites at two temperatures.
    assert len(tables["acceptance_by_position"].data) == 3 * 2 * 2 * 2


def test_a_withheld_speedup_is_withheld_from_trackers_and_summaries():
    results = sample_results()
    results.speed = [replace(one, speedup=None) for one in results.speed]
    value = tables_of(results)["speedup"].columns.index("value")
    assert {row[value] for row in tables_of(results)["speedup"].data} == {None}
    assert summary_of(results, "distilled")["speedup"] is None


class StandInArtifact(list):
    def __init__(self, name: str, kind: str, metadata: dict) -> None:
        self.kind = kind
        self.metadata = metadata

    def add_file(self, path: str, name: str) -> None:
        self.append(name)


class StandInRun:
    """Takes the place of a W&B run."""

    id = "eval-out"

    def __init__(self, *, offline: bool) -> None:
        self.offline = offline
        self.used: list[StandInArtifact] = []
        self.logged: dict = {}
        self.artifacts: list[StandInArtifact] = []
        self.summary: dict = {}

    def log(self, values, step=None):
        self.logged |= values

    def log_artifact(self, artifact):
        self.artifacts.append(artifact)

    def use_artifact(self, artifact):
        assert not self.offline  # W&B refuses it there
        self.used.append(artifact)

    def finish(self, exit_code):
        self.exit_code = exit_code


def evaluated(folder: Path, tracker: Tracker):
    results = sample_results()
    write_report(folder, results, [], [])
    track(EvalConfig(tracking=TrackingConfig(tracker=tracker)), results, folder, 3)


@pytest.mark.parametrize("offline", [True, False])
def test_an_evaluation_alone_has_its_figures_tables_page_and_files_in_wandb(
    tmp_path, monkeypatch, offline
):
    run = StandInRun(offline=offline)
    (tmp_path / "out" / "wandb").mkdir(parents=True)
    (tmp_path / "out" / "wandb" / "log").write_text("its own")
    module = SimpleNamespace(
        init=lambda **settings: run,
        Settings=lambda **settings: None,
        Artifact=StandInArtifact,
        Html=lambda text, inject: text,
        Table=lambda columns, data: data,
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_MODE", "offline")
    evaluated(tmp_path / "out", Tracker.wandb)
    assert run.logged["evaluation/acceptance_length_held_out_t0"] == pytest.approx(2.22)
    assert {f"evaluation/{name}" for name in tables_of(sample_results())} <= set(run.logged)
    assert "<svg" in run.logged["evaluation/report"]
    (artifact,) = run.artifacts
    assert artifact.kind == "evaluation"
    fingerprint = sample_results().target.fingerprint
    made_from = {one.kind: one.metadata["fingerprint"] for one in run.used}
    assert made_from == ({} if offline else {"target": fingerprint})
    assert artifact.metadata["target_fingerprint"] == fingerprint
    assert {"results.json", "report.html", "failures.jsonl"} <= set(artifact)
    assert not any("wandb" in name for name in artifact)
    assert run.exit_code == 3
    assert run.summary["summary/speedup"] == pytest.approx(1.31)


def test_an_evaluation_alone_has_its_figures_in_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    evaluated(tmp_path, Tracker.tensorboard)
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"evaluation/acceptance_length_held_out_t0" in events.read_bytes()
