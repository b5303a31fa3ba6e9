"""`python -m train.export run=RUN_FOLDER [to=FOLDER]`: the drafter folder of a run's best checkpoint.

Without `to` the folder is `RUN_FOLDER/drafter`. Works on unfinished runs too: every checkpoint
holds its drafter as a complete folder.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from specdec_runtime.formats import check_writable
from train.checkpoint import Checkpoints, read_checkpoint
from train.drafter_folder import write_card

USAGE = "usage: python -m train.export run=RUN_FOLDER [to=FOLDER]"


def export_best(run_dir: Path, to: Path) -> Path:
    """Copies the drafter of the best checkpoint to `to`, which appears complete or not at all.

    Raises:
        ValueError: if there is no good checkpoint, or `to` holds anything.
    """
    check_writable(to)
    source = best_checkpoint(run_dir) / "drafter"
    to.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    try:
        shutil.copytree(source, temporary, dirs_exist_ok=True)
        write_card(temporary)
        temporary.chmod(0o755)  # mkdtemp makes private folders
        temporary.replace(to)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return to


def best_checkpoint(run_dir: Path) -> Path:
    """The folder of the best checkpoint; the newest where acceptance was never measured.

    Raises:
        ValueError: if the run has no complete checkpoint, or its best one is damaged.
    """
    link = run_dir / "best"
    if link.exists():
        return read_checkpoint(link).folder
    newest, passed_over = Checkpoints(run_dir, keep_last=1).newest()
    if newest is None:
        reason = f" ({passed_over[0]})" if passed_over else ""
        raise ValueError(f"{run_dir} has no complete checkpoint{reason}: give a run folder")
    return newest.folder


def main() -> None:
    """The command line; exit code 2 for wrong arguments, 1 if nothing could be exported."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    given = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    if "run" not in given or not given.keys() <= {"run", "to"}:
        print(USAGE, file=sys.stderr)
        sys.exit(2)
    run_dir = Path(given["run"])
    try:
        folder = export_best(run_dir, Path(given.get("to") or run_dir / "drafter"))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    print(folder)


if __name__ == "__main__":
    main()
