"""The rows of a user's data set, each with its place, so that an error can name file and line.

JSON and CSV are read here: a line number can be said, and a value is what the file says (a table in
memory would fill absent keys with nulls, change the order of keys and turn the text "NA" into no
text). Parquet, saved data sets and the hub are read by `datasets`; nulls in them are dropped, as a
table can not tell an absent key from a null.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

# What we call the columns of a row and, the last two, the keys of a message.
COLUMNS = (
    "messages", "conversations", "turns", "prompt", "completion", "text", "system", "tools",
    "role", "content",
)  # fmt: skip
_SAVED = ("dataset_info.json", "dataset_dict.json")  # what `save_to_disk` leaves
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_MAX_FIELD_CHARS = (
    1 << 27
)  # of CSV; the module's own limit, 128 kB, is less than a long conversation


@dataclass(kw_only=True)
class DatasetConfig:
    """One data set of prompts (prompts.datasets.NAME).

    Attributes:
        path: a .jsonl, .json, .parquet, .csv or .tsv file, a folder of these, a folder that
            `datasets` saved, or a hub id.
        weight: share in the mixture, relative to those of the other data sets and sources.
        columns: what we call a column -> what it is called there, e.g. {prompt: question}; also
            for the keys of a message: {messages: dialog, role: speaker, content: words}.
        roles: what a speaker is called there -> system, user, assistant or tool.
        subset, split: of a hub id or saved folder; split may be left out where "train" is meant.
        streaming: read a hub id row by row instead of downloading it first; needs max_rows.
        max_rows: read so many rows only, from the start; null = all.
        skip_bad_rows: leave out rows that are no prompt, counted, instead of stopping at the first.
    """

    path: str
    weight: float = 1.0
    columns: dict[str, str] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    subset: str | None = None
    split: str | None = None
    streaming: bool = False
    max_rows: int | None = None
    skip_bad_rows: bool = False

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.columns) - set(COLUMNS)):
            raise ValueError(
                f"prompts.datasets: columns names {unknown[0]!r}, expected some of "
                f"{', '.join(COLUMNS)}"
            )
        if not self.weight >= 0:
            raise ValueError(f"prompts.datasets: weight must not be negative, got {self.weight}")
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"prompts.datasets: max_rows must be at least 1, got {self.max_rows}")
        if self.streaming and self.max_rows is None:
            raise ValueError(
                f"prompts.datasets: {self.path} is streamed without an end: give its max_rows"
            )


def dataset_config(name: str, settings: DatasetConfig | Mapping[str, Any]) -> DatasetConfig:
    """The settings of one data set, checked.

    Raises:
        ValueError: naming an unknown or missing setting.
    """
    if isinstance(settings, DatasetConfig):
        return settings
    known = [one.name for one in fields(DatasetConfig)]
    if not isinstance(settings, Mapping) or "path" not in settings:
        raise ValueError(f"prompts.datasets.{name} needs a path: {{path: FILE, ...}}")
    if unknown := sorted(set(settings) - set(known)):
        raise ValueError(
            f"prompts.datasets.{name}.{unknown[0]} is no setting, expected some of "
            f"{', '.join(known)}"
        )
    return DatasetConfig(**settings)


class Row(NamedTuple):
    """One row; `place` is how a message names it."""

    place: str
    value: Any


def read_rows(config: DatasetConfig) -> Iterator[Row]:
    """The rows of a data set, in its order.

    Raises:
        ValueError: for a path that is nothing we read, or a row (named) that can not be parsed.
    """
    return islice(_all_rows(config), config.max_rows)


def _all_rows(config: DatasetConfig) -> Iterator[Row]:
    path = Path(config.path).expanduser()
    if path.is_dir() and any((path / name).is_file() for name in _SAVED):
        yield from _saved_rows(path, config)
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _READERS)
        if not files:
            raise ValueError(f"folder {path} holds no prompts: expected {_suffixes()} files")
        for file in files:
            yield from _READERS[file.suffix](file)
    elif path.is_file():
        if path.suffix not in _READERS:
            raise ValueError(f"{path}: expected a {_suffixes()} file")
        yield from _READERS[path.suffix](path)
    elif path.suffix in _READERS or not _HUB_ID.fullmatch(config.path):
        raise ValueError(f"{config.path}: no such file or folder")
    else:
        yield from _hub_rows(config)


def _json_rows(path: Path) -> Iterator[Row]:
    """One object a line; a .json file may also be one array of objects, or one object."""
    if path.suffix == ".json" and (records := _json_document(path)) is not None:
        for number, record in enumerate(records, start=1):
            yield Row(f"{path} item {number}", record)
        return
    with path.open(encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield Row(f"{path}:{number}", _parsed(line, f"{path}:{number}"))
        except UnicodeDecodeError as error:
            raise ValueError(_no_utf8(path, error)) from None


def _json_document(path: Path) -> list[Any] | None:
    """The items of a file that is one array, the object of one that is one; None if it is neither."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(_no_utf8(path, error)) from None
    if text.lstrip().startswith("["):
        return _parsed(text, str(path))
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:  # one object a line, or what its line is named for
        return None


def _no_utf8(path: Path, error: UnicodeDecodeError) -> str:
    """What to say about a file of other bytes, with the first line that has them."""
    lines = enumerate(path.read_bytes().split(b"\n"), start=1)
    number = next(n for n, line in lines if line.decode("utf-8", "replace").encode() != line)
    return f"{path}:{number}: not UTF-8 text ({error.reason}): convert it"


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}" if "\n" in text.strip() else ""
        raise ValueError(
            f"{place}: not JSON ({error.msg} at {where or f'column {error.colno}'})"
        ) from None


def _csv_rows(path: Path) -> Iterator[Row]:
    csv.field_size_limit(_MAX_FIELD_CHARS)
    delimiter = "\t" if path.suffix == ".tsv" else ","
    with path.open(encoding="utf-8-sig", newline="") as lines:
        try:
            reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
            names = reader.fieldnames or []
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{path}:1: two columns are called {twice[0]!r}: rename one")
            for row in reader:
                place = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    raise ValueError(
                        f"{place}: expected {len(names)} fields as in the first "
                        "line: quote texts that hold the separator"
                    )
                yield Row(place, row)
        except UnicodeDecodeError as error:
            raise ValueError(_no_utf8(path, error)) from None
        except csv.Error as error:
            raise ValueError(f"{path}:{reader.line_num}: not CSV ({error})") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        rows = load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        yield from _table_rows(rows, str(path))
    except (DatasetGenerationError, OSError, ValueError) as error:
        raise ValueError(f"{path} is no readable Parquet file: {error}") from None


def _saved_rows(path: Path, config: DatasetConfig) -> Iterator[Row]:
    from datasets import load_from_disk

    yield from _table_rows(_one_split(load_from_disk(str(path)), config), str(path))


def _hub_rows(config: DatasetConfig) -> Iterator[Row]:
    from datasets import load_dataset

    try:
        found = load_dataset(
            config.path, config.subset, split=config.split, streaming=config.streaming
        )
        yield from _table_rows(_one_split(found, config), config.path)
    except (OSError, ValueError) as error:  # not found, no permission, no connection, no subset
        raise ValueError(
            f"{config.path} is no file or folder here, and as a data set of the hub it can not be "
            f"read ({' '.join(str(error).split())[:200]}): check the name and the connection"
        ) from None


def _one_split(found: Any, config: DatasetConfig) -> Any:
    """The wanted split of what may be a mapping of several."""
    if not isinstance(found, dict):
        return found
    name = config.split or ("train" if len(found) > 1 else next(iter(found)))
    if name not in found:
        raise ValueError(
            f"{config.path} has no split {name!r}: set split to one of {', '.join(found)}"
        )
    return found[name]


def _table_rows(rows: Any, name: str) -> Iterator[Row]:
    for number, row in enumerate(rows, start=1):
        yield Row(f"{name} row {number}", without_nulls(row))


def without_nulls(value: Any) -> Any:
    """A value without the keys that are null in it, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _suffixes() -> str:
    return ", ".join(_READERS)


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
}
