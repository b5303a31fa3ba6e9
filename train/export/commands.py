"""What `python -m train.export` does with the arguments that cli.py has checked."""

from pathlib import Path

import torch

from specdec_runtime.formats import is_drafter_folder, read_manifest
from specdec_runtime.missing_folder import missing_folder
from train.export.engine_parity import engine_lines
from train.export.exporting import export
from train.export.hub import push
from train.export.parity import verify
from train.export.registry import format_named
from train.export.run_folder import best_checkpoint, export_best
from train.export.source import read_target

OWN = "draftloop"


def run_command(given: dict[str, str]) -> None:
    """Exports, or checks, as told."""
    if "check" in given:
        check(Path(given["check"]), given)
        return
    engine = format_named(given.get("format", OWN)).NAME
    if "run" in given and engine == OWN and given.keys() <= {"run", "to", "format"}:
        run_dir = Path(given["run"])
        print(export_best(run_dir, Path(given.get("to") or run_dir / "drafter")))
        return
    drafter = Path(given["drafter"]) if "drafter" in given else drafter_of_run(Path(given["run"]))
    number = given.get("num_draft_tokens")
    done = export(
        drafter,
        Path(given.get("to") or f"{drafter}-{engine}"),
        engine=engine,
        target=given.get("target"),
        num_draft_tokens=int(number) if number else None,
        dtype=getattr(torch, given["dtype"]) if "dtype" in given else None,
        license_id=given.get("license"),
        needs_license="push_to_hub" in given,
    )
    for note in done.source.notes:
        print(note)
    print(f"{done.folder}: written, passes the rules of {engine}. To serve it:\n\n{done.launch}\n")
    if given.get("verify") == "true":
        is_rounded = (
            done.source.files.is_adapter
        )  # to its base model's dtype, unless told otherwise
        same_dtype = given.get("dtype", "bfloat16" if is_rounded else "float32") == "float32"
        print(verify(done.source, done.folder, engine=engine, same_dtype=same_dtype).describe())
        print("\n".join(engine_lines(done.source, done.folder, engine)))
    if "push_to_hub" in given:
        push(done.folder, given["push_to_hub"], dry_run=given.get("dry_run") == "true")


def drafter_of_run(run_dir: Path) -> Path:
    """What was evaluated, with its figures; of an unfinished run, its best checkpoint's drafter."""
    finished = run_dir / "drafter"
    return finished if is_drafter_folder(finished) else best_checkpoint(run_dir) / "drafter"


def check(folder: Path, given: dict[str, str]) -> None:
    """Print what the engine would stumble over, or the launch line.

    Raises:
        ValueError: something is wrong; all of it is in the message.
    """
    if problem := missing_folder(folder.absolute()):
        raise ValueError(f"{problem}; expected an exported folder")
    manifest = read_manifest(folder) if is_drafter_folder(folder) else None
    recorded = str(manifest.served.get("format", "")) if manifest else ""
    chosen = format_named(given.get("format") or recorded or OWN)
    name = given.get("target") or (manifest.target.name if manifest else "")
    if not name:
        raise ValueError(f"{folder} does not say which target it belongs to: give target=...")
    target = read_target(name)
    if problems := chosen.check(folder, target):
        raise ValueError(f"{folder} is wrong for {chosen.NAME}: " + "; ".join(problems))
    number = int(manifest.recommended.get("num_draft_tokens", 3)) if manifest else 3
    print(f"{folder}: passes the rules of {chosen.NAME}. To serve it:\n")
    print(chosen.launch(folder, target, number))
