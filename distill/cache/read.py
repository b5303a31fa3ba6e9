"""A folder of signals, mapped into memory and put to the answers that it belongs to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from distill.batches import Example
from distill.cache.manifest import SIGNALS
from distill.cache.shards import (
    ROWS,
    Entry,
    Rows,
    read_entries,
    read_tensors,
    shard_paths,
    text_hash,
)
from distill.durable import require_intact
from distill.manifests import Manifest, fingerprint
from distill.signal_forms import SignalForm

T = TypeVar("T", bound=Example)


@dataclass(frozen=True)
class SignalCache:
    """The signals of a folder.

    Attributes:
        entries: answer id -> number of its shard, place in it.
        shards: tensors of each, views of the files: the system keeps in memory what is in use.
    """

    folder: Path
    manifest: Manifest
    entries: dict[str, tuple[int, Entry]]
    shards: list[dict[str, Tensor]]

    @classmethod
    def open(cls, folder: Path, *, wanted: Manifest | None = None) -> "SignalCache":
        """Opens a folder; reads each file once to see that it is what was written.

        Args:
            wanted: the manifest that it has to have; None = any.

        Raises:
            ValueError: if it holds no signals, others than wanted (both fingerprints are named), or
                a damaged file.
        """
        manifest = SIGNALS.read(folder)
        if wanted is not None:
            SIGNALS.require_equal(folder, manifest, wanted)
        entries: dict[str, tuple[int, Entry]] = {}
        paths = shard_paths(folder)
        for number, path in enumerate(paths):
            require_intact(path)
            found = read_entries(path)
            entries |= {name: (number, entry) for name, entry in found.items()}
        return cls(folder, manifest, entries, [read_tensors(path) for path in paths])

    @property
    def fingerprint(self) -> str:
        """Of what the signals were made with."""
        return fingerprint(self.manifest)

    @property
    def form(self) -> SignalForm:
        return SignalForm(self.manifest["form"])

    def attach(self, examples: Sequence[T]) -> list[T]:
        """The examples with their signals.

        Raises:
            ValueError: if one of them has none here, or had another text when they were made.
        """
        return [replace(example, rows=self._rows(example)) for example in examples]

    def _rows(self, example: Example) -> Rows:
        if example.id not in self.entries:
            raise ValueError(
                f"{self.folder} (signals {self.fingerprint}) has none for answer {example.id}: run "
                "python -m distill.cache again, which adds what is missing"
            )
        number, entry = self.entries[example.id]
        if entry.text_hash != text_hash(example):
            raise ValueError(
                f"the signals of answer {example.id} in {self.folder} are of the text "
                f"{entry.text_hash}, the answer is now {text_hash(example)}: delete the folder and "
                "run python -m distill.cache again"
            )
        part = slice(entry.start, entry.start + entry.num_positions)
        tensors = {name: tensor[part] for name, tensor in self.shards[number].items()}
        tensors["argmax"] = tensors["argmax"].long()
        return ROWS[self.form](**tensors)
