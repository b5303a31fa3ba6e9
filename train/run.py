"""A whole run: the folder, the stages in order, and what is left behind however it ends."""

import json
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from omegaconf import OmegaConf
from transformers.utils import logging as transformers_logging

from eval.records import read_json
from eval.results import Results
from eval.summary import tables_of
from eval.trackers import check_tracker
from train.config import TrainConfig
from train.interrupts import Interrupted, StopRequest
from train.job import Job
from train.material import prepare
from train.out_of_memory import memory_advice
from train.parts import is_sharding
from train.plan import describe, measure_machine, planned_stages
from train.process_log import kept_in_log, remarks_shown
from train.processes import check_accelerate, on_main
from train.provenance import command_line, redacted
from train.run_dir import SUMMARY, RunChoice, choose_run, open_run, write_atomically
from train.run_log import RunLog
from train.sharding import shard_on_cpu
from train.stages import (
    EVALUATION,
    check_folder,
    evaluate_folder,
    export,
    export_for_engines,
    load_training,
    train_drafter,
    verify_folder,
)
from train.zero import check_zero, is_zero, start_zero

TRACEBACK = "traceback.txt"
# Ranks wait for the main one while it writes answers and evaluates.
WAIT_FOR_MAIN = timedelta(hours=12)


@dataclass(frozen=True)
class RunResult:
    """How a finished run did; `score` is the acceptance length that a sweep maximises."""

    score: float | None
    exact: bool
    run_dir: Path


def run(config: TrainConfig, config_yaml: str, argv: list[str]) -> RunResult:
    """Runs or continues a training run to its end.

    Raises:
        Interrupted: stopped by a signal; its text says what to type to continue.
        ValueError, OSError, RuntimeError: a stage failed; the traceback is in the run folder.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    check_tracker(config.tracking)
    accelerator = _accelerator(config)
    with StopRequest() as stop, remarks_shown(accelerator.is_main_process):
        choice = on_main(accelerator, lambda: _choose(config))
        if choice.finished:
            return _already_finished(choice.path, show=accelerator.is_main_process)
        lock = _open_on_main(accelerator, choice, config_yaml, argv)
        log = RunLog(
            choice.path,
            config.tracking,
            is_main=accelerator.is_main_process,
            name=config.name,
            config=_plain(redacted(config_yaml)),
        )
        job = Job(config=config, log=log, accelerator=accelerator, run_dir=choice.path, stop=stop)
        try:
            with kept_in_log(choice.path, accelerator), memory_advice(job):
                return _run_stages(job)
        except Interrupted as stopped:
            log.finish(exit_code=128 + stopped.signum)
            raise Interrupted(stopped.signum, _how_to_resume(stopped, job, argv)) from None
        except BaseException:
            log.finish(exit_code=1)
            _keep_traceback(job)
            raise
        finally:
            if lock is not None:
                lock.close()
            accelerator.free_memory()  # of the device; the next job of a sweep needs it


def _accelerator(config: TrainConfig) -> Accelerator:
    """The processes there are, as accelerate's settings have them.

    Raises:
        ValueError: for settings of accelerate that training does not go with.
    """
    try:
        accelerator = Accelerator(
            # Said, since accelerate starts no processes on CPUs that it is not told to use.
            cpu=config.target.device == "cpu" or not torch.accelerator.is_available(),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=WAIT_FOR_MAIN)],
        )
    except ImportError as error:  # it is set to DeepSpeed, which is not installed
        raise ValueError(f"accelerate: {error}") from error
    check_accelerate(accelerator)
    shard_on_cpu(accelerator)
    start_zero(accelerator)
    check_shares(config, accelerator)
    return accelerator


def check_shares(config: TrainConfig, accelerator: Accelerator) -> None:
    """Refuses what does not go with weights in shares, before anything is loaded.

    Raises:
        ValueError: naming the setting.
    """
    if is_zero(accelerator):
        check_zero(accelerator.deepspeed_plugin.deepspeed_config, config.training.precision)
    if not is_sharding(accelerator):
        return
    settings = {
        "training.compile": config.training.compile,
        "on_policy.fraction": config.on_policy.fraction,
    }
    for name, value in settings.items():
        if value:
            raise ValueError(
                f"{name}={value} does not go with FSDP2 or DeepSpeed, under which no process has the "
                "whole drafter while it trains: leave it out, or take conf/accelerate/8gpu.yaml"
            )


def _run_stages(job: Job) -> RunResult:
    started = time.monotonic()
    job.say(f"run folder: {job.run_dir}")
    if job.accelerator.is_main_process:
        machine = measure_machine(job.accelerator.device)
        job.say(describe(machine, planned_stages(job.config, machine)))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        material = prepare(job)
        training = load_training(job, material)
        state = train_drafter(job, material, training)
        folder = on_main(job.accelerator, lambda: export(job))
        on_main(job.accelerator, lambda: check_folder(job, material, training, folder))
        on_main(job.accelerator, lambda: verify_folder(job, material, training, folder, state))
        summary = on_main(job.accelerator, lambda: evaluate_folder(job, material, folder, state))
        on_main(job.accelerator, lambda: export_for_engines(job, folder))
    summary["seconds"] = round(time.monotonic() - started, 1)
    job.log.write_results(
        drafter=folder,
        evaluation=job.run_dir / EVALUATION,
        inputs=material.inputs,
        summary=summary,
        tables=tables_of(read_json(job.run_dir / EVALUATION / "results.json", Results)),
    )
    job.log.finish(exit_code=0, summary=summary)
    if job.accelerator.is_main_process:
        write_atomically(job.run_dir / SUMMARY, json.dumps(summary, indent=1))
        (job.run_dir / TRACEBACK).unlink(missing_ok=True)
        job.say(f"finished in {summary['seconds'] / 60:.1f} min; drafter: {folder}")
    return RunResult(summary["acceptance_length"], summary["exact"], job.run_dir)


def _plain(config_yaml: str) -> dict[str, Any]:
    container = OmegaConf.to_container(OmegaConf.create(config_yaml))
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _choose(config: TrainConfig) -> RunChoice:
    return choose_run(
        name=config.name,
        runs_dir=Path(config.runs_dir),
        run_dir=Path(config.run_dir) if config.run_dir else None,
        resume=config.resume,
    )


def _already_finished(path: Path, *, show: bool) -> RunResult:
    summary = json.loads((path / SUMMARY).read_text())
    if show:
        print(f"{path} is finished already; its report: {path / 'eval' / 'report.html'}")
    return RunResult(summary["acceptance_length"], summary["exact"], path)


def _open_on_main(
    accelerator: Accelerator, choice: RunChoice, config_yaml: str, argv: list[str]
) -> IO[str] | None:
    """The lock on the main process; the others only learn whether that worked."""
    locks = []

    def open_it() -> None:
        locks.append(open_run(choice, config_yaml, argv))

    on_main(accelerator, open_it)
    return locks[0] if locks else None


def _how_to_resume(stopped: Interrupted, job: Job, argv: list[str]) -> str:
    kept = [argument for argument in argv if not argument.startswith(("resume=", "run_dir="))]
    command = command_line([*kept, f"resume={job.run_dir}"])
    return f"{stopped}{job.where()}; everything so far is kept. To continue: {command}"


def _keep_traceback(job: Job) -> None:
    """The full story beside the one line on the terminal; one file a rank."""
    rank = job.accelerator.process_index
    name = TRACEBACK if rank == 0 else f"rank{rank}-{TRACEBACK}"
    try:
        (job.run_dir / name).write_text(redacted(traceback.format_exc()))
    except OSError as error:  # a full disk must not hide the first error
        print(f"the traceback was not written: {error}", file=sys.stderr)
