"""`python -m train.export`: a drafter as the folder that a serving engine reads.

    python -m train.export run=RUN_FOLDER [to=FOLDER]              the run's best checkpoint, as is
    python -m train.export drafter=FOLDER format=vllm [to=FOLDER]  for an engine; run=... works too
    python -m train.export check=FOLDER format=vllm [target=...]   an exported folder against its rules

    format=...            {formats}
    target=...            hub id or folder; default: the one recorded with the drafter
    num_draft_tokens=3    to serve with; default: what its evaluation recommends
    dtype=float32         of the weights; default: as they are
    verify=true           load the folder in another process and compare what it proposes; then in
                          the engine itself, if it is installed (make serving-env)
    license=apache-2.0    of the drafter, for its card; default: what the target's card states
    push_to_hub=ORG/NAME  upload it; with dry_run=true, say what would be uploaded

`drafter` is a folder of ours, a stock Hugging Face model with the target's tokenizer, a LoRA adapter
of one, or an EAGLE-3 checkpoint of vLLM, SGLang or the speculators library.
"""

import sys
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from specdec_runtime.formats import is_drafter_folder, read_manifest
from train.export.engine_parity import engine_lines
from train.export.exporting import export
from train.export.hub import push
from train.export.parity import verify
from train.export.registry import FORMATS, format_named
from train.export.run_folder import best_checkpoint, export_best
from train.export.source import read_target

KEYS = (
    "run",
    "drafter",
    "check",
    "to",
    "format",
    "target",
    "num_draft_tokens",
    "dtype",
    "verify",
    "license",
    "push_to_hub",
    "dry_run",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OWN = "draftloop"


def main() -> None:
    """The command line; exit code 2 for wrong arguments, 1 if nothing could be exported."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(help_text())
        return
    try:
        given = parse(sys.argv[1:])
    except ValueError as error:
        print(f"error: {error}\npython -m train.export --help says more", file=sys.stderr)
        sys.exit(2)
    transformers_logging.disable_progress_bar()
    try:
        run_command(given)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)


def help_text() -> str:
    assert __doc__ is not None
    width = max(map(len, FORMATS))
    lines = [f"{name:{width}}  {chosen.SUMMARY}" for name, chosen in FORMATS.items()]
    return __doc__.format(formats=("\n" + 26 * " ").join(lines))


def parse(arguments: list[str]) -> dict[str, str]:
    """key=value arguments as a dictionary.

    Raises:
        ValueError: an unknown key, or not exactly one of run, drafter and check.
    """
    given = dict(argument.partition("=")[::2] for argument in arguments)
    if unknown := sorted(given.keys() - set(KEYS)):
        raise ValueError(f"unknown setting {unknown[0]!r}, expected one of {', '.join(KEYS)}")
    if len(given.keys() & {"run", "drafter", "check"}) != 1:
        raise ValueError("give one of run=RUN_FOLDER, drafter=FOLDER and check=FOLDER")
    if given.get("dtype") not in (None, *DTYPES):
        raise ValueError(f"dtype={given['dtype']}, expected one of {', '.join(DTYPES)}")
    if "num_draft_tokens" in given and not given["num_draft_tokens"].isdigit():
        raise ValueError(f"num_draft_tokens={given['num_draft_tokens']}, expected a whole number")
    for name in ("verify", "dry_run"):
        if given.get(name, "false") not in ("true", "false"):
            raise ValueError(f"{name}={given[name]}, expected true or false")
    return given


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
        dtype=DTYPES.get(given.get("dtype", "")),
        license_id=given.get("license"),
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
