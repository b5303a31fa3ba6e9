"""`python -m train` as a user runs it: from nothing to a report, stopped and continued on the way."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from distill.prefixes import read_prefixes
from distill.templates import ChatTemplate
from specdec_runtime.formats import read_manifest
from specdec_runtime.tiny_target import byte_tokenizer
from train.cli import help_text, main
from train.config import TrainConfig
from train.export.cli import main as export_main
from train.interrupts import StopRequest
from train.job import Job
from train.material import prepare
from train.run_log import RunLog, read_metrics
from train.stages import load_training, train_drafter

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 240


@dataclass(frozen=True)
class Smoke:
    """A smoke run that SIGTERM stopped half-way, continued to its end by the command it printed."""

    run_dir: Path
    cache: Path
    stop_code: int | None
    stop_said: str
    continued: subprocess.CompletedProcess[str]


def call(function: Callable[[], None], argv: list[str]) -> tuple[int | None, str]:
    """(exit code, standard error) of a command line in this process."""
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()) as err:
        patch.setattr(sys, "argv", argv)
        patch.setenv("HYDRA_FULL_ERROR", "0")
        try:
            function()
        except SystemExit as ended:
            return ended.code, err.getvalue()  # type: ignore[return-value]
    return 0, err.getvalue()


def terminate_while_training(folder: Path, ended: threading.Event) -> None:
    """Sends SIGTERM to this process once some steps of a run below `folder` are logged."""
    while not ended.wait(0.02):
        for log in folder.glob("runs/smoke/*/metrics.jsonl"):
            if any(record["kind"] == "training" for record in read_metrics(log.parent)):
                os.kill(os.getpid(), signal.SIGTERM)
                return


@contextmanager
def one_thread() -> Iterator[None]:
    """As in the subprocess: other numbers of threads add up in other orders."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Smoke:
    folder, cache = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("cache")
    ended = threading.Event()
    watcher = threading.Thread(target=terminate_while_training, args=(folder, ended))
    with pytest.MonkeyPatch.context() as patch, one_thread():
        patch.chdir(folder)
        patch.setenv("DRAFTLOOP_CACHE", str(cache))
        patch.setenv("PIP_NO_INDEX", "1")
        watcher.start()
        code, said = call(main, ["train", "+experiment=smoke"])
        ended.set()
        watcher.join()
    command = shlex.split(said.rsplit("To continue: ", 1)[-1])
    assert command[:3] == ["python", "-m", "train"], said
    own = {"DRAFTLOOP_CACHE": str(cache), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    continued = subprocess.run(
        [sys.executable, *command[1:]],
        cwd=folder,
        env=os.environ | own | {"PIP_NO_INDEX": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    (run_dir,) = folder.glob("runs/smoke/*")
    return Smoke(run_dir, cache, code, said, continued)


def test_sigterm_ends_with_its_own_code_and_says_how_to_go_on(smoke: Smoke):
    assert smoke.stop_code == 128 + signal.SIGTERM
    last = smoke.stop_said.strip().splitlines()[-1]
    assert last.startswith("error: stopped by SIGTERM after step")
    assert last.endswith(f"+experiment=smoke resume=runs/smoke/{smoke.run_dir.name}")


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
    lines = smoke.stop_said.splitlines()
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
        log = RunLog(run_dir, config.tracking, is_main=True, name=config.name, config={})
        accelerator = Accelerator(cpu=True)
        yield Job(config=config, log=log, accelerator=accelerator, run_dir=run_dir, stop=stop)


def test_stopped_and_continued_equals_trained_in_one_go(
    smoke: Smoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DRAFTLOOP_CACHE", str(smoke.cache))
    with one_thread(), job_in(tmp_path) as job:
        material = prepare(job)
        train_drafter(job, material, load_training(job, material))
    name = "checkpoints/step-00000030/weights.safetensors"
    ours, theirs = load_file(tmp_path / name), load_file(smoke.run_dir / name)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    losses = [
        [record["loss"] for record in read_metrics(folder) if record["kind"] == "training"]
        for folder in (tmp_path, smoke.run_dir)
    ]
    assert losses[0] == losses[1]


def test_the_places_where_the_drafter_failed_are_prompts_of_the_next_run(smoke: Smoke):
    template = ChatTemplate(byte_tokenizer())
    prefixes = read_prefixes(smoke.run_dir, template)
    lines = (smoke.run_dir / "eval/prompts.jsonl").read_text().splitlines()
    asked = [tuple(json.loads(line)["token_ids"]) for line in lines]
    assert all(any(p.token_ids[: len(ids)] == ids for ids in asked) for p in prefixes)
    assert len({p.id for p in prefixes}) == len(prefixes) > 0


def test_the_exported_folder_is_measured_again_by_another_process(smoke: Smoke):
    said = smoke.continued.stdout + smoke.continued.stderr
    assert "exported folder in another process: acceptance length" in said


def test_a_finished_run_says_so(smoke: Smoke, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(smoke.run_dir.parents[2])
    with redirect_stdout(StringIO()) as out:
        code, _ = call(main, ["train", "+experiment=smoke", "resume=auto"])
    assert code == 0
    assert "is finished already" in out.getvalue()


def test_export_writes_another_copy_and_never_over_one(smoke: Smoke, tmp_path: Path):
    argv = ["export", f"run={smoke.run_dir}", f"to={tmp_path / 'copy'}"]
    assert call(export_main, argv)[0] == 0
    assert read_manifest(tmp_path / "copy").kind == "causal_lm"
    assert (tmp_path / "copy" / "model.safetensors").is_file()
    code, said = call(export_main, argv)
    assert code == 1
    assert "not empty" in said


def test_help_lists_every_experiment_with_what_it_does():
    text = help_text()
    for path in (ROOT / "conf" / "experiment").glob("*.yaml"):
        assert f"    {path.stem} " in text


def test_help_needs_neither_torch_nor_hydra():
    script = "import sys; sys.argv[1:] = ['--help']; import train.cli; train.cli.main()\n"
    script += "print('torch' in sys.modules or 'hydra' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_a_wrong_setting_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    code, said = call(main, ["train", "+experiment=smoke", "optim.learn_rate=1"])
    assert code == 2
    assert said == (
        "error: there is no setting optim.learn_rate: did you mean optim.learning_rate?\n"
    )
    assert list(tmp_path.iterdir()) == []
