"""One writer at a time: a lock that the operating system drops when its process dies."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock file `path` (made if missing, never deleted: a deleted lock is no lock).

    Args:
        wait: wait for another holder to finish; otherwise refuse.

    Raises:
        ValueError: if another process holds it and `wait` is False.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise ValueError(
                f"another process is writing {path.parent}: wait for it, or choose another folder"
            ) from None
        yield
