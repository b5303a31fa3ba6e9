"""One progress display for every stage: a rich bar with time left on a terminal, else plain lines.

Plain lines, at most every PLAIN_EVERY_S, go to the log of every process in any case.
"""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PLAIN_EVERY_S = 10.0
log = logging.getLogger(__name__)


class StageProgress:
    """What a stage reports to: `update(done, total, note)`. This one is silent."""

    def update(self, done: float, total: float | None = None, note: str = "") -> None:
        """`done` of `total` units (tokens, steps, prompts); `note` is a short text behind it."""


class _RichProgress(StageProgress):
    def __init__(self, bar: Progress, name: str, total: float | None, plain: StageProgress) -> None:
        self._bar, self._plain = bar, plain
        self._task = bar.add_task(name, total=total, note="")

    def update(self, done: float, total: float | None = None, note: str = "") -> None:
        self._bar.update(self._task, completed=done, note=note)
        if total is not None:
            self._bar.update(self._task, total=total)
        self._plain.update(done, total, note)


class _PlainProgress(StageProgress):
    """Lines for the log, and for standard error where they are shown."""

    def __init__(self, name: str, total: float | None, *, show: bool) -> None:
        self._name, self._total, self._show = name, total, show
        self._start = self._last = time.monotonic()
        self._first_done: float | None = None

    def update(self, done: float, total: float | None = None, note: str = "") -> None:
        self._total = self._total if total is None else total
        if self._first_done is None:
            self._first_done = done  # a resumed stage does not start at 0
        now = time.monotonic()
        if now - self._last < PLAIN_EVERY_S:
            return
        self._last = now
        line = f"{self._name}: {self._position(done, now)}{note}"
        log.info(line)
        if self._show:
            print(line, file=sys.stderr, flush=True)

    def _position(self, done: float, now: float) -> str:
        assert self._first_done is not None
        if not self._total:
            return f"{done:.0f}  "
        gained = done - self._first_done
        left_s = (now - self._start) / gained * (self._total - done) if gained > 0 else None
        left = f", {duration(left_s)} left" if left_s is not None else ""
        return f"{done:.0f} of {self._total:.0f} ({done / self._total:.0%}{left})  "


@contextmanager
def stage_progress(
    name: str, total: float | None = None, *, show: bool = True
) -> Iterator[StageProgress]:
    """The display of one stage, for the length of the block; only the main process shows it."""
    is_terminal = show and sys.stderr.isatty()
    plain = _PlainProgress(name, total, show=show and not is_terminal)
    if not is_terminal:
        yield plain
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        bar = Progress(
            *columns, *times, TextColumn("{task.fields[note]}"), console=Console(stderr=True)
        )
        with bar:
            yield _RichProgress(bar, name, total, plain)


def duration(seconds: float) -> str:
    """`8 s`, `2 min 5 s`, `1 h 20 min`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"
