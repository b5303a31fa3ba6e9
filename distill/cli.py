"""What the commands of this package share: settings composed and checked, mistakes told in one line.

Exit codes: 0 done; 1 the job failed; 2 the settings are wrong; 130 stopped by Ctrl-C, with
everything finished kept.
"""

import difflib
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

Job = TypeVar("Job")


def main(help_text: str, run: Callable[[list[str]], int]) -> None:
    """Runs a command with the arguments of the process and exits."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(help_text, end="")
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    sys.exit(run(sys.argv[1:]))


def run_command(
    overrides: list[str],
    *,
    config_name: str,
    schema: type[Job],
    run: Callable[[Job], Any],
    stopped: Callable[[Job], str],
) -> int:
    """Runs one job; whatever a user can cause ends in one line on standard error.

    Args:
        config_name: of the YAML in `conf`; its schema is stored as `<config_name>_schema`.
        stopped: what to say after Ctrl-C.
    """
    try:
        job = composed(config_name, schema, overrides)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        return _failed(2, _explained(error, schema))
    try:
        run(job)
    except KeyboardInterrupt:
        return _failed(130, stopped(job))
    except (ValueError, OSError, RuntimeError) as error:
        return _failed(1, " ".join(str(error).split()))
    return 0


def composed(config_name: str, schema: type[Job], overrides: list[str]) -> Job:
    """The settings of a command as its dataclass.

    Raises:
        ValueError: if one has no value, or one that is out of range.
    """
    ConfigStore.instance().store(name=f"{config_name}_schema", node=schema)
    with initialize_config_module("conf", version_base="1.3"):
        settings = compose(config_name, overrides=overrides)
    if missing := sorted(OmegaConf.missing_keys(settings)):
        raise ValueError(f"{missing[0]} has no value: give {missing[0]}=...")
    job = OmegaConf.to_object(settings)
    assert isinstance(job, schema)
    return job


def _explained(error: BaseException, schema: type) -> str:
    """One line; an unknown key is named with the nearest one that exists."""
    text = str(error)
    if match := re.search(r"Could not override '([^']+)'", text):
        near = difflib.get_close_matches(match[1], _key_paths(schema), n=1)
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
