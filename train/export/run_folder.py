"""The drafter of a run: its best checkpoint, which holds it as a complete folder."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from specdec_runtime.formats import whole_folder
from specdec_runtime.missing_folder import missing_folder
from train.card import write_card
from train.checkpoint import Checkpoints, read_checkpoint
from train.export.engine_parity import engine_lines
from train.export.exporting import export
from train.export.parity import verify


def export_best(run_dir: Path, to: Path) -> Path:
    """Copies the drafter of the best checkpoint to `to`, which appears complete or not at all.

    Raises:
        ValueError: if there is no good checkpoint, or `to` holds anything.
    """
    source = best_checkpoint(run_dir) / "drafter"
    with whole_folder(to) as draft:
        shutil.copytree(source, draft, dirs_exist_ok=True)
        write_card(draft)
    return to


def best_checkpoint(run_dir: Path) -> Path:
    """The folder of the best checkpoint; the newest where acceptance was never measured.

    Raises:
        ValueError: if the run has no complete checkpoint, or its best one is damaged.
    """
    if problem := missing_folder(run_dir.absolute()):
        raise ValueError(f"{problem}; expected the folder of a run")
    link = run_dir / "best"
    if link.exists():
        return read_checkpoint(link).folder
    newest, passed_over = Checkpoints(run_dir, keep_last=1).newest()
    if newest is None:
        reason = f" ({passed_over[0]})" if passed_over else ""
        raise ValueError(f"{run_dir} has no complete checkpoint{reason}: give a run folder")
    return newest.folder


def export_formats(
    drafter: Path, to: Path, formats: Sequence[str], say: Callable[[str], None]
) -> None:
    """Exports a run's drafter to `to/<format>`, each verified as `verify=true` does.

    Raises:
        ValueError, RuntimeError: a format cannot express the drafter, or what is served differs.
    """
    for form in formats:
        if (to / form).exists():
            shutil.rmtree(to / form)  # of an earlier session; the drafter that it came from is here
        done = export(drafter, to / form, engine=form)
        say(f"{done.folder}: written, passes the rules of {form}")
        say(verify(done.source, done.folder, engine=form).describe())
        for line in engine_lines(done.source, done.folder, form):
            say(line)
