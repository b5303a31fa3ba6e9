"""The folder of one run: made once, by the main process; deleting it deletes the run.

runs/<name>/<time>/
    config.yaml        every setting, resolved; secrets struck out
    provenance.json    command, git commit, versions, hardware
    metrics.jsonl      training metrics                     (train/run_log.py)
    logs/              what each process said, a file each  (train/process_log.py)
    checkpoints/ best  what training continues from         (train/checkpoint.py)
    drafter/           the folder that gets served          (train/export)
    eval/              results.json, report.html, report.md (eval)
    summary.json       written last: a run that has it is finished
"""

import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf

from train.provenance import provenance, redacted

CONFIG = "config.yaml"
SUMMARY = "summary.json"
AUTO = "auto"
# Settings that may differ between the sessions of one run: they change nothing that is trained.
FREE_ON_RESUME = ("resume", "run_dir", "runs_dir", "tracking", "training.log_every")
# In front of the saved settings, so that they are a configuration that Hydra can start from.
CONFIG_HEAD = """\
# The same again: python -m train --config-dir {folder} --config-name config
defaults:
  - train_schema
  - draft: {kind}_schema
  - _self_
  - override hydra/job_logging: none
  - override hydra/hydra_logging: none
hydra:
  output_subdir: null
  run:
    dir: .
"""


@dataclass(frozen=True)
class RunChoice:
    """Which folder a session works in."""

    path: Path
    resumed: bool

    @property
    def finished(self) -> bool:
        return (self.path / SUMMARY).is_file()


def choose_run(*, name: str, runs_dir: Path, run_dir: Path | None, resume: str | None) -> RunChoice:
    """The folder of a new run, or the one to continue.

    Args:
        resume: None for a new run; "auto" for the newest run of this name (a new one if there is
            none); or the path of a run folder.

    Raises:
        ValueError: if the folder to make is in use, or the folder to continue is no run.
    """
    if resume == AUTO:
        previous = sorted(path.parent for path in (runs_dir / name).glob(f"*/{CONFIG}"))
        if previous:
            return RunChoice(previous[-1], resumed=True)
    elif resume is not None:
        if not (Path(resume) / CONFIG).is_file():
            raise ValueError(
                f"resume={resume} is no run folder (it has no {CONFIG}): "
                f"give a folder below {runs_dir / name}, or resume=auto"
            )
        return RunChoice(Path(resume), resumed=True)
    if run_dir is not None:
        if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
            raise ValueError(
                f"run_dir={run_dir} exists and is not empty: choose another folder, "
                f"or continue that run with resume={run_dir}"
            )
        return RunChoice(run_dir, resumed=False)
    return RunChoice(_new_folder(runs_dir / name), resumed=False)


def open_run(choice: RunChoice, config_yaml: str, argv: list[str]) -> IO[str]:
    """Writes config and provenance of a new run, or checks that a resumed one is the same.

    Returns the open lock file; the folder is in use by this process until it is closed.

    Raises:
        ValueError: if another process uses the folder, or the settings differ from the run's own.
    """
    choice.path.mkdir(parents=True, exist_ok=True)
    lock = _lock(choice.path)
    config_yaml = redacted(config_yaml)
    if choice.resumed:
        _require_same_settings(choice.path, config_yaml)
        previous = json.loads((choice.path / "provenance.json").read_text())
        sessions = [*previous["sessions"], provenance(argv)]
    else:
        sessions = [provenance(argv)]
    write_atomically(choice.path / "provenance.json", json.dumps({"sessions": sessions}, indent=1))
    write_atomically(choice.path / CONFIG, _startable(config_yaml, choice.path))
    return lock


def read_settings(run_dir: Path) -> dict[str, Any]:
    """The saved settings of a run as plain values."""
    found = OmegaConf.to_container(OmegaConf.load(run_dir / CONFIG))
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items() if key not in ("defaults", "hydra")}


def _startable(config_yaml: str, folder: Path) -> str:
    """The settings as a configuration of their own, for a new run of the same."""
    settings = OmegaConf.create(config_yaml)
    settings.run_dir = settings.resume = None
    head = CONFIG_HEAD.format(folder=folder, kind=OmegaConf.select(settings, "draft.kind"))
    return head + OmegaConf.to_yaml(settings)


def write_atomically(path: Path, text: str) -> None:
    """The file holds either its old content or all of `text`."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:  # a full disk, which Python reports without a name
        temporary.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written: {error}") from error


def _new_folder(parent: Path) -> Path:
    """Makes `parent/<local time>`, with a number behind it if a run started in the same second, in
    another process of a sweep, say."""
    base = time.strftime("%Y-%m-%d_%H-%M-%S")
    path, number = parent / base, 1
    while True:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            path = parent / f"{base}-{number}"
        except OSError as error:
            raise OSError(
                f"run folder {path} can not be made ({error.strerror}): set runs_dir or run_dir to a "
                "place that can be written"
            ) from error
        else:
            return path


def _lock(path: Path) -> IO[str]:
    lock = (path / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(
            f"run folder {path} is in use by another process: wait for it or stop it"
        ) from None
    return lock


def _require_same_settings(path: Path, config_yaml: str) -> None:
    saved = _leaves(read_settings(path))
    own = _leaves(OmegaConf.to_container(OmegaConf.create(config_yaml)))
    for key in sorted(saved.keys() | own.keys()):
        free = any(key == name or key.startswith(name + ".") for name in FREE_ON_RESUME)
        if not free and saved.get(key) != own.get(key):
            raise ValueError(
                f"{key} is {own.get(key)} here and {saved.get(key)} in {path}: "
                "resume with the settings of that run, or start a new run without resume"
            )


def _leaves(node: Any, path: str = "") -> dict[str, Any]:
    """Values of a nested configuration by dotted path."""
    if not isinstance(node, dict):
        return {path: node}
    leaves: dict[str, Any] = {}
    for key, value in node.items():
        leaves |= _leaves(value, f"{path}.{key}" if path else str(key))
    return leaves
