"""One writer at a time: a lock that the operating system drops when its process dies."""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


@contextmanager
def exclusive(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock file `path` (made if missing, never deleted: a deleted lock is no lock).

    Args:
        wait: say so and wait for another holder to finish; otherwise refuse.

    Raises:
        ValueError: if another process holds it and `wait` is False.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise ValueError(
                    f"another process is writing {path.parent}: wait for it, or choose another "
                    "folder"
                ) from None
            log.info("waiting for another process that writes %s", path.parent)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
