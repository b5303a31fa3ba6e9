"""A folder that is named and not there: told at once, with the nearest one that is.

A mistyped folder must not be asked of a hub, which answers minutes later that it cannot be reached.
"""

import difflib
from pathlib import Path

from transformers.utils import cached_file


def missing_folder(name: str | Path) -> str | None:
    """What to say of a name that means a folder here which is not there; None for all other names.

    A name means a folder if it is written as one (./x, /x, ~/x, more than one slash), or if its first
    part is a folder here, unless a model of that name lies in the hub's cache.
    """
    path = Path(name).expanduser()
    if path.exists() or not _means_a_folder(str(name), path):
        return None
    nearest = nearest_path(path)
    return f"{name}: no such folder" + (f", the nearest is {nearest}" if nearest else "")


def nearest_path(path: Path) -> Path | None:
    """What is there under almost the same name, part by part; None if some part has no like."""
    found = Path(path.anchor) if path.is_absolute() else Path()
    for part in path.relative_to(path.anchor).parts:
        if part == ".." or (found / part).exists():
            found /= part
            continue
        if not found.is_dir():
            return None
        like = difflib.get_close_matches(part, sorted(x.name for x in found.iterdir()), n=1)
        if not like:
            return None
        found /= like[0]
    return found


def _means_a_folder(name: str, path: Path) -> bool:
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        return True
    if "/" not in name or not path.parent.is_dir():
        return False
    try:
        return cached_file(name, "config.json", local_files_only=True) is None
    except OSError:  # nothing of that name, or no name that a hub could have
        return True
