"""`python -m distill.answers output=FOLDER [key=value ...]`: composes and checks the settings.

Exit codes: 0 done; 1 the job failed; 2 the settings are wrong; 130 stopped by Ctrl-C, with every
finished answer kept.
"""

import difflib
import logging
import re
import sys
from dataclasses import fields, is_dataclass
from typing import get_type_hints

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distill.answers.job import AnswersJob, run_job

HELP = """\
Has a target answer prompts; what it writes, with its hidden states, is what drafters learn from.

    python -m distill.answers output=FOLDER [key=value ...]

Often set:
    output=FOLDER                 where to; an interrupted job continues there
    target.model=MODEL            hub id, local folder or GGUF file
    prompts.file=a.jsonl          your own prompts: prompt, messages or turns on each line
    answers.temperatures=[0,1]    as the target is served
    answers.max_tokens=200000     stop after so many tokens; answers.max_seconds likewise
"""


def main() -> None:
    """Runs the command line and exits."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(HELP, end="")
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    sys.exit(run_command(sys.argv[1:]))


def run_command(overrides: list[str]) -> int:
    """Runs one job; whatever a user can cause ends in one line on standard error."""
    try:
        job = _composed(overrides)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        return _failed(2, _explained(error))
    try:
        run_job(job)
    except KeyboardInterrupt:
        return _failed(130, f"stopped; the same command continues in {job.output}")
    except (ValueError, OSError, RuntimeError) as error:
        return _failed(1, " ".join(str(error).split()))
    return 0


def _composed(overrides: list[str]) -> AnswersJob:
    ConfigStore.instance().store(name="answers_schema", node=AnswersJob)
    with initialize_config_module("conf", version_base="1.3"):
        settings = compose("answers", overrides=overrides)
    if missing := sorted(OmegaConf.missing_keys(settings)):
        raise ValueError(f"{missing[0]} has no value: give {missing[0]}=...")
    job = OmegaConf.to_object(settings)
    assert isinstance(job, AnswersJob)
    return job


def _explained(error: BaseException) -> str:
    """One line; an unknown key is named with the nearest one that exists."""
    text = str(error)
    if match := re.search(r"Could not override '([^']+)'", text):
        near = difflib.get_close_matches(match[1], _key_paths(AnswersJob), n=1)
        return f"there is no setting {match[1]}" + (f": did you mean {near[0]}?" if near else "")
    return (str(error.__cause__) if error.__cause__ else text).strip().splitlines()[0]


def _key_paths(schema: type, prefix: str = "") -> list[str]:
    hints = get_type_hints(schema)
    paths = []
    for field in fields(schema):
        paths.append(prefix + field.name)
        if is_dataclass(hints[field.name]):
            paths += _key_paths(hints[field.name], f"{prefix}{field.name}.")
    return paths


def _failed(exit_code: int, message: str) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return exit_code
