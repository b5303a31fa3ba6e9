"""A sweep's jobs side by side, when all of them are done."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from train.provenance import redacted
from train.run_dir import write_atomically

SUMMARY = "sweep.md"
JOBS = "jobs"  # how each job ended, a file each: jobs may run in other processes
HYDRAS_OWN = "multirun.yaml"  # everything that was typed, as Hydra keeps it


class Outcome(NamedTuple):
    """How a job ended; `score`, the acceptance length, is what a sweep maximises. None marks a trial
    as failed for Optuna, which goes on with the others."""

    exit_code: int
    score: float | None = None
    run_dir: Path | None = None
    message: str = ""  # what went wrong


class SweepJob(NamedTuple):
    """One job of a sweep with what it was given."""

    overrides: list[str]
    outcome: Outcome


def forget_jobs(folder: Path) -> None:
    """Of an earlier sweep into the same folder, whose table is made anew too."""
    for path in (folder / JOBS).glob("*.json"):
        path.unlink()


def keep_job(folder: Path, number: int, job: SweepJob) -> None:
    """Leaves how a job ended in the sweep's folder."""
    outcome = job.outcome._asdict() | {"run_dir": job.outcome.run_dir and str(job.outcome.run_dir)}
    path = folder / JOBS / f"{number:04d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, redacted(json.dumps({"overrides": job.overrides, "outcome": outcome})))


def kept_jobs(folder: Path) -> list[SweepJob]:
    """All jobs that ended, in their order."""
    jobs = []
    for path in sorted((folder / JOBS).glob("*.json")):
        kept = json.loads(path.read_text())
        run_dir = kept["outcome"].pop("run_dir")
        outcome = Outcome(**kept["outcome"], run_dir=run_dir and Path(run_dir))
        jobs.append(SweepJob(kept["overrides"], outcome))
    return jobs


def own_overrides(jobs: Sequence[SweepJob]) -> list[str]:
    """For each job the overrides that not all jobs share."""
    shared = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    return [" ".join(one for one in job.overrides if one not in shared) or "-" for job in jobs]


def rows_of(jobs: Sequence[SweepJob]) -> list[list[str]]:
    """[settings, acceptance length, exit code, run folder or error] of each job, the best first."""
    rows = []
    for settings, job in zip(own_overrides(jobs), jobs, strict=True):
        one = job.outcome
        score = f"{one.score:.3f}" if one.score is not None else "failed"
        rows.append(
            (one.score, [settings, score, str(one.exit_code), one.message or str(one.run_dir)])
        )
    rows.sort(key=lambda row: -math.inf if row[0] is None else row[0], reverse=True)
    return [row for _, row in rows]


def strike_out_secrets(folder: Path) -> None:
    """In what Hydra itself keeps of a sweep."""
    path = folder / HYDRAS_OWN
    if path.is_file() and redacted(text := path.read_text()) != text:
        write_atomically(path, redacted(text))


HEADS = ("settings", "acceptance length", "exit code", "run folder")


def print_sweep(jobs: Sequence[SweepJob], folder: Path) -> None:
    """The table on the terminal, and as `sweep.md` in the sweep's folder."""
    rows = rows_of(jobs)
    table = Table(box=None, pad_edge=False, title=f"{len(jobs)} jobs", title_justify="left")
    for number, head in enumerate(HEADS):
        table.add_column(head, justify="right" if number in (1, 2) else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)
    lines = ["| " + " | ".join(row) + " |" for row in (HEADS, ["---"] * len(HEADS), *rows)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY).write_text(redacted("\n".join(lines) + "\n"))
