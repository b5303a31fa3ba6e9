"""Progress of an evaluation: a bar with time left on a terminal, a line a part in a log file."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Advance = Callable[[int], None]  # called with the number of units just finished
Stage = Callable[[str, int], AbstractContextManager[Advance]]  # (name, total units) -> display


@contextmanager
def terminal_stage(name: str, total: int) -> Iterator[Advance]:
    """The display of one part: a bar on a terminal, else one line when it is done."""
    if not sys.stderr.isatty():
        started = time.monotonic()
        yield lambda count: None
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, *times, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def silent_stage(name: str, total: int) -> Iterator[Advance]:
    """No display."""
    yield lambda count: None
