"""The display of a stage: a bar on a terminal, plain lines in a log file, both with the time left."""

import io

import pytest

from train import progress
from train.progress import duration, stage_progress

NOTE = "loss 0.4000  acceptance length 1.50  120 tokens/s"


class Clock:
    """Two seconds pass between any two looks at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 2.0
        return self.now


def shown(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool, show: bool = True) -> str:
    """What a training of ten steps prints, resumed behind its fourth."""
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)
    monkeypatch.setattr(progress, "time", Clock())
    monkeypatch.setenv("COLUMNS", "160")
    with stage_progress("training", 10, show=show) as display:
        for step in range(5, 8):
            display.update(step, 10, NOTE)
    return screen.getvalue()


def test_lines_of_a_log_file_have_step_loss_acceptance_rate_and_time_left(monkeypatch):
    lines = shown(monkeypatch, is_terminal=False).splitlines()
    assert lines[-1].startswith("training: 7 of 10 (70%, 9 s left)")
    assert lines[-1].endswith(NOTE)
    assert "\x1b" not in "".join(lines)  # nothing that only a terminal understands


def test_a_terminal_shows_them_in_one_line(monkeypatch):
    screen = shown(monkeypatch, is_terminal=True)
    assert "training" in screen
    assert "7/10" in screen
    assert "left" in screen
    assert NOTE in screen


def test_other_processes_show_nothing(monkeypatch):
    assert shown(monkeypatch, is_terminal=True, show=False) == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.4, "8 s"), (125, "2 min 5 s"), (660, "11 min"), (4800, "1 h 20 min")]
)
def test_times_are_as_exact_as_they_are_long(seconds: float, text: str):
    assert duration(seconds) == text
