"""`python -m train` as a user runs it: from nothing to a report, stopped and continued on the way."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specdec_runtime.formats import read_manifest
from train.cli import help_text, main
from train.config import TrainConfig
from train.export import main as export_main
from train.interrupts import StopRequest
from train.job import Job
from train.material import prepare
from train.run_log import read_metrics
from train.stages import load_training, train_drafter

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 240


@dataclass(frozen=True)
class Smoke:
    """A finished smoke run that SIGTERM had stopped half-way, and what each session said."""

    run_dir: Path
    cache: Path
    stopped: subprocess.CompletedProcess[str]
    continued: subprocess.CompletedProcess[str]


def environment(cache: Path) -> dict[str, str]:
    own = {"DRAFTLOOP_CACHE": str(cache), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return os.environ | own | {"PIP_NO_INDEX": "1", "OMP_NUM_THREADS": "1"}


def start(arguments: list[str], folder: Path, cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env=environment(cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=TIMEOUT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_for_training(folder: Path, process: subprocess.Popen[str]) -> Path:
    """The run folder, once some steps are logged in it."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        for log in folder.glob("runs/smoke/*/metrics.jsonl"):
            if any(record["kind"] == "training" for record in read_metrics(log.parent)):
                return log.parent
        time.sleep(0.02)
    raise AssertionError(process.communicate())


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Smoke:
    folder, cache = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("cache")
    first = start(["train", "+experiment=smoke"], folder, cache)
    run_dir = wait_for_training(folder, first)
    first.send_signal(signal.SIGTERM)
    stopped = ended(first)
    command = shlex.split(stopped.stderr.rsplit("To continue: ", 1)[-1])
    assert command[:2] == ["python", "-m"], stopped.stderr
    continued = ended(start(command[2:], folder, cache))
    return Smoke(run_dir, cache, stopped, continued)


def test_sigterm_ends_with_its_own_code_and_says_how_to_go_on(smoke: Smoke):
    assert smoke.stopped.returncode == 128 + signal.SIGTERM
    last = smoke.stopped.stderr.strip().splitlines()[-1]
    assert last.startswith("error: stopped by SIGTERM")
    assert f"+experiment=smoke resume={smoke.run_dir.relative_to(smoke.run_dir.parents[2])}" in last


def test_the_continued_run_ends_with_report_table_and_verdict(smoke: Smoke):
    assert smoke.continued.returncode == 0, smoke.continued.stderr
    assert "continuing after step" in smoke.continued.stderr
    assert "speedup" in smoke.continued.stdout
    for name in ("eval/report.html", "eval/report.md", "eval/results.json", "summary.json"):
        assert (smoke.run_dir / name).stat().st_size > 0, name
    summary = json.loads((smoke.run_dir / "summary.json").read_text())
    assert summary["exact"]
    assert summary["steps"] == 30


def test_a_plan_with_times_comes_before_the_work(smoke: Smoke):
    lines = smoke.stopped.stderr.splitlines()
    plan = next(i for i, line in enumerate(lines) if line.startswith("Plan on"))
    assert all("about" in line for line in lines[plan : plan + 6])


def test_the_folder_loads_with_the_plain_library_and_names_its_target(smoke: Smoke):
    folder = smoke.run_dir / "drafter"
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    manifest = read_manifest(folder)
    assert manifest.kind == "causal_lm"
    assert manifest.measured["acceptance_length_held_out_t0"] >= 1
    assert manifest.target.fingerprint
    assert "load_drafter" in (folder / "README.md").read_text()


def test_metrics_cover_every_stage_without_repetition(smoke: Smoke):
    records = [(record["kind"], record["step"]) for record in read_metrics(smoke.run_dir)]
    assert len(records) == len(set(records))
    assert [step for kind, step in records if kind == "acceptance"] == [0, 10, 20, 30]
    assert records[-1] == ("evaluation", 30)


@contextmanager
def job_in(run_dir: Path) -> Iterator[Job]:
    with initialize_config_module("conf", version_base="1.3"):
        config = OmegaConf.to_object(compose("train", overrides=["+experiment=smoke"]))
    assert isinstance(config, TrainConfig)
    with StopRequest() as stop:
        accelerator = Accelerator(cpu=True)
        yield Job(config=config, settings={}, accelerator=accelerator, run_dir=run_dir, stop=stop)


def test_stopped_and_continued_equals_trained_in_one_go(
    smoke: Smoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DRAFTLOOP_CACHE", str(smoke.cache))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the sessions had
    with job_in(tmp_path) as job:
        material = prepare(job)
        train_drafter(job, material, load_training(job, material))
    torch.set_num_threads(threads)
    name = "checkpoints/step-00000030/weights.safetensors"
    ours, theirs = load_file(tmp_path / name), load_file(smoke.run_dir / name)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    losses = [
        [record["loss"] for record in read_metrics(folder) if record["kind"] == "training"]
        for folder in (tmp_path, smoke.run_dir)
    ]
    assert losses[0] == losses[1]


def test_export_writes_another_copy_and_never_over_one(
    smoke: Smoke,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    argv = ["export", f"run={smoke.run_dir}", f"to={tmp_path / 'copy'}"]
    monkeypatch.setattr(sys, "argv", argv)
    export_main()
    assert read_manifest(tmp_path / "copy").kind == "causal_lm"
    assert (tmp_path / "copy" / "model.safetensors").is_file()
    with pytest.raises(SystemExit) as error:
        export_main()
    assert error.value.code == 1
    assert "not empty" in capsys.readouterr().err


def test_help_lists_every_experiment_with_what_it_does():
    text = help_text()
    for path in (ROOT / "conf" / "experiment").glob("*.yaml"):
        assert f"    {path.stem} " in text


def test_help_needs_neither_torch_nor_hydra(tmp_path: Path):
    script = "import sys; sys.argv[1:] = ['--help']; import train.cli; train.cli.main()\n"
    script += "print('torch' in sys.modules or 'hydra' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_a_wrong_setting_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", ["train", "+experiment=smoke", "optim.learn_rate=1"])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2
    said = "error: there is no setting optim.learn_rate: did you mean optim.learning_rate?\n"
    assert capsys.readouterr().err == said
    assert list(tmp_path.iterdir()) == []
