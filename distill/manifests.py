"""Folders that know what they were made with, so that nothing stale or foreign is taken for right.

A manifest is everything that decides what a folder's contents are, in JSON's own types. Two folders
of equal fingerprint hold equal things. Where a target lies on this machine does not count.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.durable import save_text

Manifest = dict[str, Any]


def fingerprint(manifest: Mapping[str, Any]) -> str:
    """16 hexadecimal digits; where a target lies on this machine does not count."""
    named = {key: value for key, value in manifest.items() if key != "target"}
    content = json.dumps(named, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class FolderKind:
    """What a folder holds.

    Attributes:
        what: "answers", "signals": in messages, and the manifest's file name.
        format_version: that this version writes and reads.
    """

    what: str
    format_version: int

    @property
    def file_name(self) -> str:
        return f"{self.what}.json"

    def claim(self, folder: Path, manifest: Manifest) -> None:
        """Makes `folder` one of this manifest, or finds that it is.

        Raises:
            ValueError: if it holds something of another one, naming both fingerprints and what
                differs.
        """
        path = folder / self.file_name
        if path.exists():
            self.require_equal(folder, self.read(folder), manifest)
            return
        others = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
        if others:
            raise ValueError(
                f"{folder} holds {others[0]} and no {self.file_name}: choose an empty folder for "
                f"{self.what}"
            )
        save_text(path, json.dumps(manifest, indent=2, sort_keys=True) + "\n")

    def require_equal(self, folder: Path, found: Manifest, wanted: Manifest) -> None:
        """Refuses what was made with something else (case F8).

        Raises:
            ValueError: naming both fingerprints and the first setting that differs.
        """
        if fingerprint(found) == fingerprint(wanted):
            return
        keys = [*wanted, *(key for key in found if key not in wanted)]
        key = next(k for k in keys if found.get(k) != wanted.get(k) and k != "target")
        raise ValueError(
            f"{folder} holds {self.what} {fingerprint(found)}, wanted are {fingerprint(wanted)}: "
            f"{key} is {found.get(key)!r} there and {wanted.get(key)!r} here; use another folder, "
            "or delete this one"
        )

    def read(self, folder: Path) -> Manifest:
        """The manifest of a folder.

        Raises:
            ValueError: if there is none, or one that this version does not know.
        """
        path = folder / self.file_name
        if not path.is_file():
            raise ValueError(f"{folder} holds no {self.what} ({self.file_name} is missing)")
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}): make the {self.what} again") from None
        if not isinstance(manifest, dict):
            raise ValueError(f"{path} is no manifest: make the {self.what} again")
        if manifest.get("format_version") != self.format_version:
            raise ValueError(
                f"{path} has format {manifest.get('format_version')}, this version reads "
                f"{self.format_version}: make the {self.what} again"
            )
        return manifest
