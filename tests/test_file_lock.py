"""One writer at a time, and nobody waits in silence."""

import logging
import threading
from pathlib import Path

import pytest

from specdec_runtime.file_lock import exclusive


def test_waiting_is_said_and_ends_when_the_other_is_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "made" / "x.lock"
    entered = threading.Event()

    def second() -> None:
        with exclusive(path):
            entered.set()

    caplog.set_level(logging.INFO)
    with exclusive(path):
        assert not caplog.messages
        thread = threading.Thread(target=second)
        thread.start()
        while not caplog.messages:
            thread.join(0.01)
        assert not entered.is_set()
    thread.join()
    assert entered.is_set()
    assert f"waiting for another process that writes {path.parent}" in caplog.messages


def test_refuses_at_once_when_told_not_to_wait(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with (
        exclusive(path),
        pytest.raises(ValueError, match="another process is writing"),
        exclusive(path, wait=False),
    ):
        pass
