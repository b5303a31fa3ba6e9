"""What a process of a run says: on the screen, and in a log file of its own in the run folder.

    logs/rank0.log    of the main process: what it says, how far its stages are, warnings, its error
    logs/rank1.log    the same of the next one, which shows nothing on the screen

Each line begins with its time. A continued run writes on behind its earlier sessions.
"""

import contextlib
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from accelerate import Accelerator

from train.provenance import redacted

LOGS = "logs"
CALLED = ("distill", "eval", "specdec_runtime")  # packages that tell their remarks to loggers
log = logging.getLogger(__name__)


@contextmanager
def remarks_shown(is_main: bool) -> Iterator[None]:
    """What the stages' packages log, on standard error of the main process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    with _told(handler, CALLED if is_main else ()):
        yield


@contextmanager
def kept_in_log(run_dir: Path, accelerator: Accelerator) -> Iterator[None]:
    """All of it in this process's file, also what is not shown, and the error that ends the block.

    Raises:
        OSError: if the file can not be opened. A disk that fills up later is an error of what has to
            be kept, metrics and checkpoints, and none of the log's.
    """
    rank = accelerator.process_index
    folder = run_dir / LOGS
    folder.mkdir(exist_ok=True)
    handler = _LogFile(folder / f"rank{rank}.log", encoding="utf-8")
    handler.setFormatter(_Redacting("%(asctime)s %(levelname)s %(message)s"))
    with contextlib.closing(handler), _told(handler, ("train", *CALLED)), _warnings_logged():
        place = f"{os.getpid()} on {platform.node()}"
        log.info("rank %d of %d, process %s", rank, accelerator.num_processes, place)
        try:
            yield
        except BaseException as error:
            log.error("%s: %s", type(error).__name__, error)
            raise


@contextmanager
def _told(handler: logging.Handler, names: tuple[str, ...]) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@contextmanager
def _warnings_logged() -> Iterator[None]:
    """Warnings go where they went, and to the log."""
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        shown(message, category, filename, lineno, file, line)
        log.warning("%s: %s (%s:%d)", category.__name__, message, filename, lineno)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown


class _Redacting(logging.Formatter):
    """Without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


class _LogFile(logging.FileHandler):
    """Loses what a full disk does not take."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Says nothing, see `kept_in_log`."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()
