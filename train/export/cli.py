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

from train.export.formats import SUMMARIES

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
DTYPES = ("float32", "bfloat16", "float16")
MOST_DRAFT_TOKENS = 128  # vLLM's own bound; what pays is a few


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
    # Only now: torch takes seconds to import, and `--help` needs none of this.
    from transformers.utils import logging as transformers_logging

    from train.export.commands import run_command

    transformers_logging.disable_progress_bar()
    try:
        run_command(given)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)


def help_text() -> str:
    assert __doc__ is not None
    width = max(map(len, SUMMARIES))
    lines = [f"{name:{width}}  {summary}" for name, summary in SUMMARIES.items()]
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
    number = given.get("num_draft_tokens", "1")
    if not number.isdecimal() or not 1 <= int(number) <= MOST_DRAFT_TOKENS:
        raise ValueError(f"num_draft_tokens={number}, expected 1 to {MOST_DRAFT_TOKENS}")
    for name in ("verify", "dry_run"):
        if given.get(name, "false") not in ("true", "false"):
            raise ValueError(f"{name}={given[name]}, expected true or false")
    repository = given.get("push_to_hub")
    if repository is not None and (repository.count("/") != 1 or not all(repository.split("/"))):
        raise ValueError(f"push_to_hub={repository}, expected ORG/NAME")
    if "dry_run" in given and repository is None:
        raise ValueError("dry_run says what would be uploaded: give push_to_hub=ORG/NAME too")
    return given
