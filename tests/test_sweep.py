"""Sweeps and repeated runs: every job is told apart, failures are seen, settings start again."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import nn

from tests.test_config import composed
from tests.test_run_log import StandIn
from tests.toy_training import ToyBatch, ToyTerms, cross_entropy, run_toy, score_of, toy_parts
from train.checkpoint import WEIGHTS, Checkpoints
from train.cli import main
from train.cli_errors import check_complete
from train.config import TrainConfig
from train.interrupts import Interrupted
from train.job import Job
from train.run import RunResult
from train.run_dir import RunChoice, open_run, read_settings
from train.sweep import Outcome, SweepJob, own_overrides, rows_of

ONE_BY_ONE = BasicLauncher.launch
OVERRIDES = ("+experiment=smoke", "loss=jsd", "acceptance.num_draft_tokens=5", "resume=auto")


def jobs_of(*scores: float | None) -> list[SweepJob]:
    return [
        SweepJob(
            ["+experiment=smoke", f"seed={seed}"],
            Outcome(int(score is None), score, Path(f"run{seed}"), "" if score else "it broke"),
        )
        for seed, score in enumerate(scores)
    ]


def test_the_table_names_what_differs_and_puts_the_best_first():
    jobs = jobs_of(1.2, None, 1.4)
    assert own_overrides(jobs) == ["seed=0", "seed=1", "seed=2"]
    assert rows_of(jobs) == [
        ["seed=2", "1.400", "0", "run2"],
        ["seed=0", "1.200", "0", "run0"],
        ["seed=1", "failed", "1", "it broke"],
    ]


def swept(monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str) -> int | str | None:
    """Exit code of a sweep whose runs are stood in for: seed 1 fails."""

    def run(config: TrainConfig, config_yaml: str, argv: list[str]) -> RunResult:
        assert f"seed={config.seed}" in argv  # the command of this job alone
        if config.seed == 1:
            raise ValueError("seed 1 is bad")
        if config.seed == 7:
            raise Interrupted(signal.SIGTERM, "stopped by SIGTERM")
        score = 1.0 + config.seed / 10 + config.optim.learning_rate
        return RunResult(score, True, Path(f"runs/smoke/{config.seed}"))

    monkeypatch.setattr("train.run.run", run)
    monkeypatch.setattr(sys, "argv", ["train", "-m", "+experiment=smoke", *overrides])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def launched_in_processes(
    launcher: BasicLauncher, job_overrides: list[list[str]], initial_job_idx: int
) -> list[JobReturn]:
    """As launchers for clusters do it: nothing but what is returned comes back from a job."""
    returned = []
    for number, overrides in enumerate(job_overrides, initial_job_idx):
        child = os.fork()
        if child == 0:
            one = ONE_BY_ONE(launcher, [overrides], number)
            os._exit(0 if one[0].status is JobStatus.COMPLETED else 1)
        assert os.waitpid(child, 0)[1] == 0
        returned.append(JobReturn(status=JobStatus.COMPLETED))
    return returned


def toy_stages(seen: list[str]) -> Callable[[Job], RunResult]:
    """Stands for the stages of a run: trains a toy; seed 1 fails in the middle of a step."""

    def stages(job: Job) -> RunResult:
        for failed in job.run_dir.parent.glob("*/traceback.txt"):  # said before the next job starts
            settings = OmegaConf.load(failed.with_name("config.yaml"))
            seen.append(f"seed={settings.seed}: {failed.read_text().splitlines()[-1]}")

        def objective(drafter: nn.Module, batch: ToyBatch) -> ToyTerms:
            terms = cross_entropy(drafter, batch)
            if job.config.seed == 1 and batch.num_tokens > 10:
                raise RuntimeError("the device is gone")
            return terms

        parts = toy_parts(objective=objective)
        run_toy(job.run_dir, parts, max_steps=6)
        job.log.finish(exit_code=0)
        return RunResult(score_of(parts) + job.config.seed, True, job.run_dir)

    return stages


def test_a_failing_job_fails_the_sweep_and_the_one_behind_it_equals_a_run_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    seen: list[str] = []
    wandb = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(
        "train.run.check_tracker", lambda tracking: None
    )  # it looks for the package
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("train.run._run_stages", toy_stages(seen))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    scores, codes = [], []
    for folder, overrides in (("sweep", ["-m", "seed=1,2"]), ("alone", ["seed=2"])):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        monkeypatch.setattr(
            sys, "argv", ["train", *overrides, "+experiment=smoke", "tracking=wandb"]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        codes.append(ended.value.code)
        newest = max((tmp_path / folder).glob("runs/smoke/*"), key=lambda run: run.name)
        scores.append(load_file(Checkpoints(newest, keep_last=2).newest()[0].folder / WEIGHTS))
    assert codes == [1, 0]
    assert seen == ["seed=1: RuntimeError: the device is gone"]
    names, ended = zip(*wandb.ended, strict=True)
    assert ended == (1, 0, 0)  # each job is a run of its own there, the failed one is marked
    assert len(set(names[:2])) == 2
    assert capsys.readouterr().err.count("error: the device is gone") == 1
    (table,) = tmp_path.glob("sweep/runs/sweeps/*/sweep.md")
    lines = table.read_text().splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == ["| seed=2", "| seed=1"]
    second, alone = scores
    assert second.keys() == alone.keys()
    assert all(torch.equal(second[name], alone[name]) for name in alone)


def test_a_sweep_without_failures_ends_with_0_and_one_run_folder_for_all_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert swept(monkeypatch, tmp_path, "seed=0,2") == 0
    assert swept(monkeypatch, tmp_path, "seed=0,2", "run_dir=here") == 2
    assert "every job of a sweep makes its own" in capsys.readouterr().err


def test_a_job_that_is_stopped_ends_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert swept(monkeypatch, tmp_path, "seed=0,7,1") == 128 + signal.SIGTERM
    (table,) = tmp_path.glob("runs/sweeps/*/sweep.md")
    assert [line.split(" | ")[0] for line in table.read_text().splitlines()[2:]] == [
        *("| seed=0", "| seed=7")
    ]


def test_a_variable_that_is_not_set_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["train", "+experiment=smoke", "target.model=${oc.env:NOPE}"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: environment variable NOPE is not set\n"


def test_jobs_in_processes_of_a_launcher_are_in_the_table_and_in_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(BasicLauncher, "launch", launched_in_processes)
    assert swept(monkeypatch, tmp_path, "seed=2,1,0") == 1
    (table,) = tmp_path.glob("runs/sweeps/*/sweep.md")
    lines = table.read_text().splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == ["| seed=2", "| seed=0", "| seed=1"]
    assert lines[-1].endswith("| failed | 1 | seed 1 is bad |")


def test_a_later_sweep_into_the_same_folder_has_its_own_jobs_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for seeds, code in (("seed=0,1", 1), ("seed=0", 0)):
        assert swept(monkeypatch, tmp_path, seeds, "hydra.sweep.dir=here") == code
    assert len((tmp_path / "here" / "sweep.md").read_text().splitlines()) == 2 + 1


def test_ctrl_c_before_a_run_begins_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def stopped() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("train.cli._run_command_line", stopped)
    monkeypatch.setattr(sys, "argv", ["train", "+experiment=smoke"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 128 + signal.SIGINT
    assert capsys.readouterr().err == "error: stopped before a run began\n"


def test_nothing_that_is_kept_of_a_sweep_holds_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    secret = "hf_" + "a1B2" * 8
    assert swept(monkeypatch, tmp_path, "seed=0,1", f"+target.template_options.key={secret}") == 1
    kept = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(kept) == 4  # Hydra's, our table and what the two jobs left
    assert not any(secret in text for text in kept)


def test_optuna_searches_for_the_highest_acceptance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    search = ("hydra/sweeper=tune", "hydra.sweeper.n_trials=4", "seed=choice(1,2)")
    rate = "optim.learning_rate=interval(0.001,0.1)"
    assert swept(monkeypatch, tmp_path, *search, rate) in (0, 1)  # 1 if it tried seed 1
    (found,) = tmp_path.glob("runs/sweeps/*/optimization_results.yaml")
    (table,) = tmp_path.glob("runs/sweeps/*/sweep.md")
    best = table.read_text().splitlines()[2]
    assert float(best.split(" | ")[1]) == pytest.approx(
        OmegaConf.load(found)["best_value"], abs=1e-3
    )


def test_jobs_can_go_to_a_cluster():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    with initialize_config_module("conf", version_base="1.3"):
        settings = compose(
            "train",
            overrides=["+experiment=smoke", "hydra/launcher=slurm", "hydra.launcher.partition=big"],
            return_hydra_config=True,
        )
    launcher = settings.hydra.launcher
    assert (launcher.partition, launcher.gpus_per_node, launcher.timeout_min) == ("big", 1, 480)


def test_the_saved_settings_start_the_same_run_again(tmp_path: Path):
    config = composed(*OVERRIDES)
    choice = RunChoice(tmp_path / "run", resumed=False)
    open_run(choice, OmegaConf.to_yaml(OmegaConf.structured(config)), ["train"]).close()
    with initialize_config_dir(str(choice.path), version_base="1.3"):
        again = compose("config")
    check_complete(again, TrainConfig)
    config.resume = None  # a new run of its own
    assert OmegaConf.to_object(again) == config
    assert read_settings(choice.path)["loss"]["name"] == "jsd"
