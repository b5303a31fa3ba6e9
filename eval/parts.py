"""Finished parts of an evaluation, kept on disk until all are done, so that a rerun continues.

Each part is a JSON file that names the evaluation it belongs to (a fingerprint of target, drafters,
prompts and settings); parts of another evaluation are ignored and overwritten.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from eval.records import from_json, to_json, write_json

FOLDER = "parts"
T = TypeVar("T")


class Parts:
    """Computes each part once.

    Args:
        folder: of the evaluation; None writes nothing.
        fingerprint: from `fingerprint_of`.
    """

    def __init__(self, folder: Path | None, fingerprint: str) -> None:
        self._folder = None if folder is None else folder / FOLDER
        self._fingerprint = fingerprint
        self._done: dict[str, Any] = {}

    def get(self, name: str, kind: Any, compute: Callable[[], T]) -> T:
        """The part called `name`: read if an earlier run finished it, else computed and kept, on disk
        and for the rest of this run.

        Args:
            kind: its type, for reading it back (records.py).
        """
        if name not in self._done:
            self._done[name] = self._read_or(name, kind, compute)
        return self._done[name]

    def _read_or(self, name: str, kind: Any, compute: Callable[[], T]) -> T:
        if self._folder is None:
            return compute()
        path = self._folder / f"{re.sub(r'[^A-Za-z0-9_.=-]+', '_', name)}.json"
        stored = _read(path)
        if stored is not None and stored["fingerprint"] == self._fingerprint:
            return from_json(kind, stored["value"])
        value = compute()
        write_json(path, {"fingerprint": self._fingerprint, "value": to_json(value)})
        return value

    def forget(self) -> None:
        """Remove the kept parts: the evaluation is complete."""
        self._done.clear()
        if self._folder is not None and self._folder.exists():
            shutil.rmtree(self._folder)


def fingerprint_of(*facts: Any) -> str:
    """A short hash of anything JSON can hold."""
    text = json.dumps(to_json(list(facts)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(path: Path) -> Any:
    """The content of a part, None where there is none or it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
