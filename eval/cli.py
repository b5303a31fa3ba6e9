"""`python -m eval drafter=DIR [key=value ...]`: measures drafters of one target, writes a report.

Exit codes: 0 measured; 1 it failed; 2 the settings are wrong; 3 the output is not the target's (the
report says where); 130 stopped by Ctrl-C, with every finished part kept. HYDRA_FULL_ERROR=1 shows
the traceback behind a message.
"""

import difflib
import logging
import os
import re
import sys
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

if TYPE_CHECKING:
    from omegaconf import DictConfig

HELP = """\
Measures whether drafters pay for one target: exactness, acceptance, speed, costs, verdict.

    python -m eval drafter=DIR [key=value ...]

Often set:
    drafter=DIR                      the drafter the page is about: a folder, a hub id, or lookup
    drafters=[DIR2,HUB_ID]           more of them, side by side
    target=MODEL                     default: the target named in the drafter's folder
    prompts=FILE.jsonl               default: those kept by the run that made the drafter
    suites=[held_out,mt_bench]       of them, by name; fetched: mt_bench, humaneval, rag, ...
    tracking=wandb                   or tensorboard: figures, tables and the page go there too
    output=FOLDER                    default: runs/eval/TIME; an interrupted one is continued
    evaluation.num_prompts=24        prompts a suite
    evaluation.max_new_tokens=64     length of every answer
    evaluation.time_limit_s=260      prompts and repeats shrink to fit

All settings: python -m eval drafter=DIR --cfg job
"""


def main() -> None:
    """Runs the command line and exits."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(HELP, end="")
        return
    sys.argv = [sys.argv[0], *map(spelled_out, sys.argv[1:])]
    sys.exit(_run_command_line())


def spelled_out(argument: str) -> str:
    """`target=X` as `target.model=X`, `prompts=X` as `prompts_file=X`.

    conf/ has groups of these names, which belong to training; Hydra would look for a choice there.
    """
    argument = re.sub(r"^target=", "target.model=", argument)
    return re.sub(r"^prompts=", "prompts_file=", argument)


def _run_command_line() -> int:
    before = os.environ.get("HYDRA_FULL_ERROR", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us instead of being printed by Hydra
    try:
        return _compose_and_run(show_traceback=before == "1")
    finally:
        os.environ["HYDRA_FULL_ERROR"] = before


def _compose_and_run(*, show_traceback: bool) -> int:
    # Only now: torch takes seconds to import, and `--help` needs none of this.
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    codes = []

    def job(settings: "DictConfig") -> None:
        codes.append(_run_job(settings, show_traceback=show_traceback))

    # Registers the schema that conf/eval.yaml starts from.
    from eval.config import EvalConfig

    command = hydra.main(config_path="pkg://conf", config_name="eval", version_base="1.3")(job)
    try:
        command()
    except (HydraException, OmegaConfBaseException) as error:
        if show_traceback:
            raise
        print(f"error: {explain(error, EvalConfig)}", file=sys.stderr)
        return 2
    return max(codes, default=0)


def _run_job(settings: "DictConfig", *, show_traceback: bool) -> int:
    """One evaluation; whatever a user can cause ends in one line on standard error."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from eval.config import EvalConfig

    try:
        config = OmegaConf.to_object(settings)
        assert isinstance(config, EvalConfig)
    except (OmegaConfBaseException, ValueError) as error:
        if show_traceback:
            raise
        return _failed(2, explain(error, EvalConfig))
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)

    from eval.session import evaluate_from

    try:
        return evaluate_from(config)
    except KeyboardInterrupt:
        return _failed(130, "stopped; finished parts are kept: the same command with the same "
                            "output= continues")  # fmt: skip
    except (ValueError, OSError, RuntimeError) as error:
        if show_traceback:
            raise
        return _failed(1, " ".join(str(error).split()))


def explain(error: BaseException, schema: type) -> str:
    """One line about a setting that does not exist, is missing or has a wrong value."""
    cause = error.__cause__ or error
    text = f"{error}\n{cause}"
    if match := re.search(r"Could not override '([^']+)'", text):
        return _unknown(match[1], schema)
    if match := re.search(r"full_key: (\S+)", text):
        if "not in" in text:
            return _unknown(match[1], schema)
        if "Missing mandatory value" in text:
            return f"{match[1]} has no value: give {match[1]}=..."
        return f"{match[1]}: {str(cause).strip().splitlines()[0]}"
    return str(cause).strip().splitlines()[0]


def _unknown(path: str, schema: type) -> str:
    valid = _paths(schema)
    near = difflib.get_close_matches(path, valid, n=1, cutoff=0.6)
    by_end = {key.rsplit(".", 1)[-1]: key for key in valid}
    if not near:
        last = path.rsplit(".", 1)[-1]
        near = [by_end[name] for name in difflib.get_close_matches(last, by_end, n=1)]
    hint = f"did you mean {near[0]}?" if near else "see python -m eval drafter=DIR --cfg job"
    return f"there is no setting {path}: {hint}"


def _paths(schema: Any, prefix: str = "") -> list[str]:
    """All dotted paths of a dataclass tree."""
    paths = []
    hints = get_type_hints(schema)
    for field in fields(schema):
        paths.append(prefix + field.name)
        if is_dataclass(hints[field.name]):
            paths += _paths(hints[field.name], f"{prefix}{field.name}.")
    return paths


def _failed(exit_code: int, message: str) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return exit_code
