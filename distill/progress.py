"""A progress bar of a command of this package."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

Progress = Callable[[int, int, str], None]  # done, total, what else to say


@contextmanager
def bar(name: str) -> Iterator[Progress]:
    """A bar on standard error with the time left, from the first report on."""
    columns = (
        TextColumn(name),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f}"),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(name, total=1, note="", visible=False)

        def report(done: int, total: int, note: str) -> None:
            shown.update(task, completed=done, total=total, note=note, visible=True)

        yield report
