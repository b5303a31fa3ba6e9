"""Turns what goes wrong while a configuration is composed into one line with a remedy.

Hydra and OmegaConf report a wrong key, choice or value in several lines of their own vocabulary; the
user gets the config path that was typed and the nearest one that exists.
"""

import dataclasses
import difflib
import math
import re
from itertools import chain
from typing import Any, get_type_hints

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

# What other trainers have a setting for and this one does on purpose without: part of its name, why.
LEFT_OUT = {
    "pack": "rows are padded to others of their length and never packed, which would gain 1.6 % of "
    "the positions and has to be kept apart in every attention (docs/data.md)",
}
CONFIG_ERRORS = (HydraException, OmegaConfBaseException)


def explain(error: BaseException, schema: type) -> str:
    """One line about an exception of CONFIG_ERRORS.

    Args:
        schema: the dataclass of the whole configuration; its fields are the valid keys.
    """
    cause = error.__cause__ or error
    text = f"{error}\n{cause}" if cause is not error else str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_choice(error.missing_cfg_file, list(error.options or []))
    if isinstance(error, OverrideParseException):
        return f"{error.override} can not be read: {_first_line(str(error))}"
    if match := re.search(r"Could not override '([^']+)'\. No match in the defaults list", text):
        group = match[1]
        return f"{group}=... is not among the defaults: write +{group}=... in front of it"
    if match := re.search(r"Could not override '([^']+)'", text):
        return unknown_key(match[1], schema)
    if match := re.search(
        r"Key '[^']+' (?:is )?not in (?:(?!full_key).)*full_key: (\S+)", text, re.DOTALL
    ):
        return unknown_key(match[1], schema)
    if isinstance(cause, InterpolationResolutionError):
        found = re.search(r"Environment variable '([^']+)' not found", text)
        return f"environment variable {found[1]} is not set" if found else _first_line(text)
    place = re.search(r"full_key: (\S+)", text)
    if place and isinstance(cause, OmegaConfBaseException):
        return f"{place[1]}: {_first_line(str(cause))}"
    return _first_line(text)


def unknown_key(path: str, schema: type) -> str:
    """Names the nearest valid key; the last part of a key weighs as much as the whole path, and may be
    the initials of one (lr)."""
    for part, reason in LEFT_OUT.items():
        if part in path.rsplit(".", 1)[-1]:
            return f"there is no setting {path}: {reason}"
    valid = key_paths(schema)
    node, _, last = path.rpartition(".")
    near = [key for key in valid if initials(key) == (node, last)]
    near = near or difflib.get_close_matches(path, valid, n=1, cutoff=0.75)
    if not near:
        ends = {key.rsplit(".", 1)[-1]: key for key in reversed(valid)}
        near = [ends[name] for name in difflib.get_close_matches(last, ends, n=1, cutoff=0.7)]
    hint = f"did you mean {near[0]}?" if near else "see `python -m train --cfg job` for all keys"
    return f"there is no setting {path}: {hint}"


def initials(path: str) -> tuple[str, str]:
    """("optim", "lr") of optim.learning_rate."""
    node, _, last = path.rpartition(".")
    return node, "".join(word[:1] for word in last.split("_"))


def key_paths(schema: type, prefix: str = "") -> list[str]:
    """All dotted paths of a dataclass tree, nodes and leaves; of a node that comes in several
    kinds, those of all kinds."""
    paths: dict[str, None] = {}
    for kind in _with_subclasses(schema):
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            path = prefix + field.name
            paths[path] = None
            if dataclasses.is_dataclass(hints[field.name]):
                paths |= dict.fromkeys(key_paths(hints[field.name], path + "."))
    return list(paths)


def _with_subclasses(schema: type) -> list[type]:
    """A class and all below it."""
    below = chain.from_iterable(map(_with_subclasses, schema.__subclasses__()))
    return [schema, *below]


def check_complete(config: DictConfig, schema: type) -> None:
    """Resolves everything and refuses what is missing, was added with `+`, or is no finite number.

    Raises:
        ValueError: naming the key.
        OmegaConfBaseException: for an interpolation that does not resolve.
    """
    OmegaConf.resolve(config)
    valid = set(key_paths(schema))
    for path, value in _values(OmegaConf.to_container(config)).items():
        if path not in valid and not _in_open_node(path, schema):
            raise ValueError(unknown_key(path, schema))
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(one, float) and not math.isfinite(one) for one in numbers):
            raise ValueError(f"{path} is {value}, expected a finite number")
    if missing := sorted(OmegaConf.missing_keys(config)):
        also = " or start an experiment" if missing[0] == "name" else ""
        raise ValueError(f"{missing[0]} has no value: give {missing[0]}=...{also}")


def _unknown_choice(file: str, options: list[str]) -> str:
    group, _, choice = file.rpartition("/")
    near = difflib.get_close_matches(choice, options, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return (
        f"there is no {group or 'config'} {choice}{hint}; choices: {', '.join(options) or 'none'}"
    )


def _values(node: Any, path: str = "") -> dict[str, Any]:
    """What stands at each path, nodes and leaves."""
    if not isinstance(node, dict):
        return {}
    found: dict[str, Any] = {}
    for key, value in node.items():
        child = f"{path}.{key}" if path else str(key)
        found |= {child: value, **_values(value, child)}
    return found


def _in_open_node(path: str, schema: type) -> bool:
    """Whether some parent of `path` is a field that holds free keys (dict[str, ...])."""
    parts = path.split(".")
    node: Any = schema
    for part in parts[:-1]:
        hints = get_type_hints(node)
        if part not in hints:
            return False
        node = hints[part]
        if not dataclasses.is_dataclass(node):
            return True
    return False


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]
