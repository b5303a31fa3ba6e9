"""`python -m train` as a user runs it: from nothing to a report, stopped and continued on the way."""

import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from accelerate import Accelerator
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from distill.prefixes import read_prefixes
from distill.templates import ChatTemplate
from eval.sampling_check import sampling_checks
from eval.trackers import Value
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.formats import read_manifest
from specdec_runtime.loading import load_drafter, load_target
from specdec_runtime.tiny_target import byte_tokenizer
from tests.toy_prompts import write_prompts
from train.cli import help_text, main
from train.config import TrainConfig
from train.export.cli import main as export_main
from train.export.observation import NUM_CONTEXTS
from train.interrupts import StopRequest
from train.job import Job
from train.material import prepare
from train.rng import seed_everything
from train.run_log import RunLog, read_metrics
from train.stages import load_training, train_drafter

ROOT = Path(__file__).parent.parent
STEPS = 12
SMOKE = (
    "+experiment=smoke",
    "prompts.file=asked.jsonl",  # the word problems of the experiment take seconds to import
    "training.precision=fp32",
    "on_policy.fraction=0.2",
    f"training.max_steps={STEPS}",
    "acceptance.every=4",
)


class Ended(NamedTuple):
    """What a command left behind."""

    code: int | str | None
    out: str
    err: str


@dataclass(frozen=True)
class Smoke:
    """A smoke run that SIGTERM stopped half-way, continued to its end by the command it printed."""

    run_dir: Path
    cache: Path
    stopped: Ended
    continued: Ended


def call(function: Callable[[], object], argv: list[str]) -> Ended:
    """A command line, run in this process."""
    code: int | str | None = 0
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(StringIO()) as out,
        redirect_stderr(StringIO()) as err,
    ):
        patch.setattr(sys, "argv", argv)
        patch.setenv("HYDRA_FULL_ERROR", "0")
        try:
            function()
        except SystemExit as ended:
            code = ended.code
    return Ended(code, out.getvalue(), err.getvalue())


def python_m(*arguments: str) -> Ended:
    """`python -m MODULE ARGUMENT ...`, as the interpreter would run it."""
    module = arguments[0]
    return call(lambda: runpy.run_module(module, run_name="__main__"), list(arguments))


def terminate_while_training(patch: pytest.MonkeyPatch) -> None:
    """Has this process get SIGTERM, once, as soon as a step of a run is logged."""
    write = RunLog.write

    def write_and_terminate(log: RunLog, kind: str, step: int, values: dict[str, Value]) -> None:
        write(log, kind, step, values)
        if kind == "training":
            patch.setattr(RunLog, "write", write)
            os.kill(os.getpid(), signal.SIGTERM)

    patch.setattr(RunLog, "write", write_and_terminate)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Smoke:
    folder, cache = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("cache")
    write_prompts(folder / "asked.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("DRAFTLOOP_CACHE", str(cache))
        patch.setenv("PIP_NO_INDEX", "1")
        # The check of the sampling rules is tests/test_sampling_check.py's.
        few = partial(sampling_checks, num_draws=20_000)
        patch.setattr("eval.measurements.sampling_checks", few)
        # Of the processes that the run starts itself.
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        terminate_while_training(patch)
        stopped = python_m("train", *SMOKE)
        command = shlex.split(stopped.err.rsplit("To continue: ", 1)[-1])
        assert command[:3] == ["python", "-m", "train"], stopped.err
        seed_everything(77)  # a process that starts anew does not have the numbers of the first
        continued = python_m(*command[2:])
    (run_dir,) = folder.glob("runs/smoke/*")
    return Smoke(run_dir, cache, stopped, continued)


def test_sigterm_ends_with_its_own_code_and_says_how_to_go_on(smoke: Smoke):
    assert smoke.stopped.code == 128 + signal.SIGTERM
    last = smoke.stopped.err.strip().splitlines()[-1]
    assert last.startswith("error: stopped by SIGTERM after step")
    assert last.endswith(f"{SMOKE[-1]} resume=runs/smoke/{smoke.run_dir.name}")


def test_the_continued_run_ends_with_report_table_and_verdict(smoke: Smoke):
    assert smoke.continued.code == 0, smoke.continued.err
    assert "continuing after step" in smoke.continued.err
    assert "speedup" in smoke.continued.out
    for name in ("eval/report.html", "eval/report.md", "eval/results.json", "summary.json"):
        assert (smoke.run_dir / name).stat().st_size > 0, name
    summary = json.loads((smoke.run_dir / "summary.json").read_text())
    assert summary["exact"]
    assert summary["steps"] == STEPS


def test_a_plan_with_times_comes_before_the_work(smoke: Smoke):
    lines = smoke.stopped.err.splitlines()
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


def test_every_checkpoint_is_a_drafter_for_the_runtime_as_it_is(smoke: Smoke):
    target = load_target("tiny-random")
    folders = sorted(smoke.run_dir.glob("checkpoints/step-*/drafter"))
    assert len(folders) >= 2
    for folder in folders:
        decoder = SpeculativeDecoder(target, load_drafter(folder, target), num_draft_tokens=2)
        found = decoder.generate([[5, 6, 7]], max_new_tokens=6, eos_token_id=[])
        assert found.stats.num_drafted > 0


def test_the_log_of_the_run_has_both_sessions(smoke: Smoke):
    text = (smoke.run_dir / "logs" / "rank0.log").read_text()
    assert text.count("INFO rank 0 of 1, process") == 2
    assert "ERROR Interrupted: stopped by SIGTERM" in text
    assert "INFO continuing after step" in text


def test_metrics_cover_every_stage_without_repetition(smoke: Smoke):
    records = [(record["kind"], record["step"]) for record in read_metrics(smoke.run_dir)]
    assert len(records) == len(set(records))
    assert [step for kind, step in records if kind == "acceptance"] == [0, 4, 8, STEPS]
    assert records[-1] == ("evaluation", STEPS)


@contextmanager
def job_in(run_dir: Path) -> Iterator[Job]:
    with initialize_config_module("conf", version_base="1.3"):
        config = OmegaConf.to_object(compose("train", overrides=[*SMOKE]))
    assert isinstance(config, TrainConfig)
    with StopRequest() as stop:
        log = RunLog(run_dir, config.tracking, is_main=True, name=config.name, config={})
        accelerator = Accelerator(cpu=True)
        yield Job(config=config, log=log, accelerator=accelerator, run_dir=run_dir, stop=stop)


def test_stopped_and_continued_equals_trained_in_one_go(
    smoke: Smoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DRAFTLOOP_CACHE", str(smoke.cache))
    monkeypatch.chdir(smoke.run_dir.parents[2])
    with job_in(tmp_path) as job:
        material = prepare(job)
        train_drafter(job, material, load_training(job, material))
    name = f"checkpoints/step-{STEPS:08d}/weights.safetensors"
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
    said = smoke.continued.out + smoke.continued.err
    found = re.search(r"the trained drafter's proposals at 100\.0% of (\d+) contexts, accept", said)
    assert found is not None
    assert int(found[1]) >= NUM_CONTEXTS


def test_a_finished_run_says_so(smoke: Smoke, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(smoke.run_dir.parents[2])
    again = python_m("train", *SMOKE, "resume=auto")
    assert again.code == 0
    assert "is finished already" in again.out


def test_export_writes_another_copy_and_never_over_one(smoke: Smoke, tmp_path: Path):
    argv = ["export", f"run={smoke.run_dir}", f"to={tmp_path / 'copy'}"]
    assert call(export_main, argv).code == 0
    assert read_manifest(tmp_path / "copy").kind == "causal_lm"
    assert (tmp_path / "copy" / "model.safetensors").is_file()
    refused = call(export_main, argv)
    assert refused.code == 1
    assert "not empty" in refused.err


def test_help_lists_every_experiment_with_what_it_does():
    text = help_text()
    for path in (ROOT / "conf" / "experiment").glob("*.yaml"):
        assert f"    {path.stem} " in text


def test_help_needs_no_torch_and_that_of_a_run_no_hydra():
    script = "import sys; sys.argv[1:] = ['--help']; import train.cli; train.cli.main()\n"
    script += "assert 'hydra' not in sys.modules\n"
    for name in ("distill.answers", "distill.cache", "distill.doctor", "train.export"):
        script += f"import {name}.cli; {name}.cli.main()\n"
    script += "print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_a_wrong_setting_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    ended = call(main, ["train", "+experiment=smoke", "optim.learn_rate=1"])
    assert ended.code == 2
    assert ended.err == (
        "error: there is no setting optim.learn_rate: did you mean optim.learning_rate?\n"
    )
    assert list(tmp_path.iterdir()) == []
