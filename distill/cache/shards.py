"""The files of a folder of signals: signals-NUMBER-HASH.safetensors, HASH of what is in them.

A file holds the fields of `TargetRows` or `SparseRows` for the positions of some answers, one behind
the other, and, as metadata, [id, hash of the text, positions] of each.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from distill.batches import Example
from distill.durable import opened_tensors, save_checked_tensors
from distill.signal_forms import SignalForm, SignalsConfig
from distill.signals import TargetRows, rounded
from distill.sparse_signals import SparseRows

_PATTERN = "signals-*.safetensors"

Rows = TargetRows | SparseRows
ROWS: dict[SignalForm, type[TargetRows] | type[SparseRows]] = {
    SignalForm.hidden: TargetRows,
    SignalForm.sparse: SparseRows,
}


@dataclass(frozen=True)
class Entry:
    """One answer of a shard; its positions are [start, start + num_positions) of the tensors."""

    text_hash: str
    start: int
    num_positions: int


def write_shard(
    folder: Path, examples: Sequence[Example], rows: Sequence[Rows], config: SignalsConfig
) -> Path:
    """Writes the next shard: the signals of some examples, complete or not at all."""
    form: Any = ROWS[config.form]
    joined = form.join(rows)
    tensors: dict[str, Tensor] = {f.name: getattr(joined, f.name) for f in fields(joined)}
    tensors["argmax"] = tensors["argmax"].int()
    if "hidden" in tensors:
        tensors["hidden"] = rounded(tensors["hidden"], config.dtype.torch)
    records = [[e.id, text_hash(e), len(r)] for e, r in zip(examples, rows, strict=True)]
    taken = [int(path.stem.split("-")[1]) for path in shard_paths(folder)]
    stem = f"signals-{1 + max(taken, default=-1):05d}"
    return save_checked_tensors(folder, stem, tensors, {"examples": json.dumps(records)})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a shard, mapped: nothing is read from the disk before it is looked at.

    Raises:
        ValueError: if the file is damaged.
    """
    with opened_tensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_entries(path: Path) -> dict[str, Entry]:
    """Answer id -> where its signals are in a shard.

    Raises:
        ValueError: if the file is damaged.
    """
    with opened_tensors(path) as file:
        records = json.loads(file.metadata()["examples"])
    entries, start = {}, 0
    for name, text, count in records:
        entries[name] = Entry(text, start, count)
        start += count
    return entries


def shard_paths(folder: Path) -> list[Path]:
    """The complete shards, in the order they were written."""
    return sorted(folder.glob(_PATTERN))


def remove_unfinished(folder: Path) -> None:
    """Deletes what an interrupted job has left; only for the one who holds the folder's lock."""
    for path in folder.glob(f".{_PATTERN}"):
        path.unlink()


def text_hash(example: Example) -> str:
    """16 hexadecimal digits of a text's tokens and of which of them are learned."""
    digest = hashlib.sha256(example.prompt_length.to_bytes(8, "little"))
    digest.update(example.token_ids.numpy().tobytes())
    return digest.hexdigest()[:16]
