"""Dataclasses to JSON and back, for results.json and for parts kept from an interrupted run.

JSON has no NaN and no infinity: such a number is written as null. Only what the results use is
supported: dataclasses, lists, tuples, dicts with string or integer keys, and plain scalars.
"""

import dataclasses
import json
import math
import os
import tempfile
import types
import typing
from pathlib import Path
from typing import Any


def to_json(value: Any) -> Any:
    """Plain dicts, lists and scalars; NaN and infinity become None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: to_json(getattr(value, field.name)) for field in fields}
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    assert value is None or isinstance(value, str | int | float | bool), type(value)
    return value


def from_json(kind: Any, data: Any) -> Any:
    """The inverse of `to_json` for a type annotation: a dataclass, list[...], X | None, ...

    Raises:
        TypeError, KeyError: if the data does not have the shape of the type (a field that has a
            default may be missing).
    """
    if data is None or kind is Any:
        return data
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return from_json(next(a for a in arguments if a is not type(None)), data)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        fields = dataclasses.fields(kind)
        return kind(
            **{
                field.name: from_json(hints[field.name], data[field.name])
                for field in fields
                if field.name in data  # files of before a field was added lack it
            }
        )
    if origin is list:
        return [from_json(arguments[0], item) for item in data]
    if origin is tuple:
        return tuple(from_json(arguments[0], item) for item in data)
    if origin is dict:
        return {arguments[0](key): from_json(arguments[1], item) for key, item in data.items()}
    return data


def write_text(path: Path, text: str) -> None:
    """Write a file so that readers see the old one or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(name, 0o644)  # mkstemp makes files that only their owner can read
    os.replace(name, path)


def write_json(path: Path, value: Any) -> None:
    """Valid JSON with stable key order; `allow_nan=False` guards what `to_json` promises."""
    write_text(path, json.dumps(to_json(value), indent=1, allow_nan=False) + "\n")


def read_json(path: Path, kind: Any) -> Any:
    """Read what `write_json` wrote as `kind`."""
    return from_json(kind, json.loads(path.read_text(encoding="utf-8")))
