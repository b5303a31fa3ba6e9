"""`python -m train +experiment=NAME [key=value ...]`: composes and checks the settings, then runs.

Exit codes: 0 done; 1 a stage failed; 2 the settings are wrong; 3 done, but the output is not the
target's; 130 and 143 stopped by Ctrl-C and SIGTERM with everything saved. A sweep ends with the
highest one of its jobs, and behind a job that was stopped. HYDRA_FULL_ERROR=1 shows the traceback
behind a message.
"""

import os
import signal
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from train.sweep import Outcome

HELP = """\
Distils a drafter for a target LLM, measures it in the built-in runtime and reports whether it pays.

    python -m train +experiment=NAME [key=value ...]

Experiments:
{experiments}

Often set:
    target.model=...            hub id, local folder or GGUF file of the target
    prompts.file=a.jsonl        your own prompts: a file, folder or hub id (docs/data.md)
    training.budget_minutes=20  time for training; answers and evaluation come on top
    loss=NAME                   {losses}
    tracking=wandb              log to Weights & Biases as well (offline without a key)
    resume=auto                 continue the newest run of the experiment; or resume=RUN_FOLDER

All settings: python -m train +experiment=NAME --cfg job
Sweeps: -m key=a,b,c          on a cluster: hydra/launcher=slurm as well
The same run again: python -m train --config-dir RUN_FOLDER --config-name config
Your own experiments: --config-dir FOLDER, which holds experiment/NAME.yaml
Many processes: accelerate launch -m train +experiment=NAME
"""


NOT_EXACT = 3
STOPPED = 128  # and the number of the signal


def main() -> None:
    """Runs the command line and exits."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(help_text(), end="")
        return
    try:
        code = _run_command_line()
    except KeyboardInterrupt:
        print("error: stopped before a run began", file=sys.stderr)
        code = STOPPED + signal.SIGINT
    sys.exit(code)


def help_text() -> str:
    """The help; reads file names only, so that it is there at once."""
    width = max(map(len, _choices("experiment")))
    experiments = [f"    {name:{width}}  {text}" for name, text in _choices("experiment").items()]
    return HELP.format(experiments="\n".join(experiments), losses=", ".join(_choices("loss")))


def _choices(group: str) -> dict[str, str]:
    """Name -> first sentence of the leading comment, of each file of a config group."""
    found = {}
    for file in sorted(files("conf").joinpath(group).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            lines = file.read_text(encoding="utf-8").splitlines()
            comments = [line[1:].strip() for line in lines if line.startswith("# ")]
            said = [line for line in comments if not line.startswith("@")]
            found[file.name.removesuffix(".yaml")] = said[0] if said else ""
    return found


def _run_command_line() -> int:
    """Composes the settings of one run, or of each job of a sweep; returns the exit code."""
    # Only now: torch takes seconds to import, and `--help` needs none of this.
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from train.cli_sweep import SweepFolder
    from train.sweep import SweepJob, keep_job, kept_jobs, print_sweep, strike_out_secrets

    show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us instead of being printed by Hydra
    SweepFolder.started = None
    codes: list[int] = []
    own_process = os.getpid()

    def job(settings: "DictConfig") -> float | None:
        hydra_settings = HydraConfig.get()
        is_sweep = hydra_settings.mode is RunMode.MULTIRUN
        # As typed: what they refer to, an environment variable, is not put in its place.
        typed = OmegaConf.to_container(hydra_settings.overrides.task, resolve=False)
        assert isinstance(typed, list)
        overrides = [str(one) for one in typed]
        # Of a sweep's job, what starts it alone; it may run in a process of a launcher, too.
        argv = ["train", *overrides] if is_sweep else sys.argv
        sweep_dir = Path(hydra_settings.sweep.dir)
        if is_sweep:
            strike_out_secrets(sweep_dir)
        outcome = _run_job(settings, argv, is_sweep=is_sweep, show_traceback=show_traceback)
        codes.append(outcome.exit_code)
        if is_sweep:
            keep_job(sweep_dir, hydra_settings.job.num, SweepJob(overrides, outcome))
            if outcome.exit_code > STOPPED and os.getpid() == own_process:
                raise KeyboardInterrupt  # whoever stopped this job does not want the next one
        return outcome.score

    command = hydra.main(config_path="pkg://conf", config_name="train", version_base="1.3")(job)
    code = 0
    try:
        code = _start(command, show_traceback=show_traceback)
    except KeyboardInterrupt:
        if not codes:
            raise
    if SweepFolder.started and (jobs := kept_jobs(SweepFolder.started)):
        print_sweep(jobs, SweepFolder.started)
        codes = [one.outcome.exit_code for one in jobs]
    return max(code, *codes, 0)


def _start(command: Callable[[], None], *, show_traceback: bool) -> int:
    """Has Hydra compose the settings and start the jobs; the exit code of what goes wrong around
    them."""
    from train.cli_errors import CONFIG_ERRORS, explain
    from train.config import TrainConfig  # registers what conf/train.yaml starts from

    try:
        command()
    except (*CONFIG_ERRORS, RuntimeError) as error:
        if show_traceback:
            raise
        if isinstance(error, CONFIG_ERRORS):
            return _failed(2, explain(error, TrainConfig)).exit_code
        return _failed(1, str(error)).exit_code  # of a launcher, such as a job that was killed
    return 0


def _run_job(
    settings: "DictConfig", argv: list[str], *, is_sweep: bool, show_traceback: bool
) -> "Outcome":
    """One run; whatever a user can cause ends in one line on standard error."""
    from omegaconf import OmegaConf

    from train.cli_errors import CONFIG_ERRORS, check_complete, explain
    from train.config import TrainConfig
    from train.interrupts import Interrupted

    try:
        check_complete(settings, TrainConfig)
        config = OmegaConf.to_object(settings)
        assert isinstance(config, TrainConfig)
        if is_sweep and (config.run_dir is not None or config.resume is not None):
            raise ValueError(
                "run_dir and resume name one run, and every job of a sweep makes its own: "
                "leave them out, or continue one job without -m"
            )
    except (*CONFIG_ERRORS, ValueError) as error:
        if show_traceback:
            raise
        return _failed(2, explain(error, TrainConfig))

    from train.run import run
    from train.sweep import Outcome

    try:
        result = run(config, OmegaConf.to_yaml(settings), argv)
    except Interrupted as stopped:
        return _failed(STOPPED + stopped.signum, str(stopped))
    except (ValueError, OSError, RuntimeError) as error:
        if show_traceback:
            raise
        return _failed(1, " ".join(str(error).split()))
    if not result.exact:
        _failed(NOT_EXACT, "the drafter changed the target's text; the report says where")
    return Outcome(0 if result.exact else NOT_EXACT, result.score, result.run_dir)


def _failed(exit_code: int, message: str) -> "Outcome":
    from train.sweep import Outcome

    print(f"error: {message}", file=sys.stderr, flush=True)
    return Outcome(exit_code, message=message)
