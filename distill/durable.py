"""Files that are complete under their name or not there, whatever kills the process that writes them."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_DIGITS = 16  # of a SHA-256 in a file name


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file under a hidden name, flushes it to disk, then renames it."""
    unfinished = _hidden(path)
    _write(unfinished, tensors, metadata)
    unfinished.rename(path)
    _flush(path.parent)


def save_checked_tensors(
    folder: Path, stem: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Path:
    """The same, under a name that ends in the first digits of the contents' SHA-256."""
    unfinished = folder / f".{stem}.safetensors"
    _write(unfinished, tensors, metadata)
    path = folder / f"{stem}-{_digest(unfinished)}.safetensors"
    unfinished.rename(path)
    _flush(folder)
    return path


def require_intact(path: Path) -> None:
    """Reads a file of `save_checked_tensors` once.

    Raises:
        ValueError: if its contents are not those of its name.
    """
    named, found = path.stem.rsplit("-", 1)[-1], _digest(path)
    if named != found:
        raise ValueError(
            f"{path} is damaged (SHA-256 {found}, written was {named}): delete it and run again"
        )


def save_text(path: Path, text: str) -> None:
    """A text file, complete or not there."""
    unfinished = _hidden(path)
    unfinished.write_text(text, encoding="utf-8")
    _flush(unfinished)
    unfinished.rename(path)


@contextmanager
def opened_tensors(path: Path) -> Iterator[Any]:
    """A safetensors file, mapped into memory: what is read of a tensor is read from the disk.

    Raises:
        ValueError: if the file is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete it and run again") from None


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    save_file(dict(tensors), path, metadata=dict(metadata))
    path.chmod(0o644)  # safetensors makes private files
    _flush(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_DIGITS]


def _hidden(path: Path) -> Path:
    """What a file is called while it is written."""
    return path.with_name(f".{path.name}")


def _flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
