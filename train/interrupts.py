"""SIGINT and SIGTERM: the training loop ends its step and saves; any other stage stops at once.

One handler for both signals. Inside `deferred()` the first signal only sets a flag that the loop
reads between steps; a second one, and any signal outside, raises `Interrupted`. The command line
turns it into exit code 128 + signal number (130 for Ctrl-C, 143 for SIGTERM).
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """Stops the program in an orderly way; `signum` says which signal asked for it."""

    def __init__(self, signum: int, message: str = "") -> None:
        super().__init__(message or f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class StopRequest:
    """Owns the two signal handlers while it is entered."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signum: int | None = None
        self._deferring = False

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        first = self.signum is None
        self.signum = signum
        if not (self._deferring and first):
            raise Interrupted(signum)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """While inside, the first signal waits for whoever reads `signum`."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
