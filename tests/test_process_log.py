"""The log of a process: with times, without secrets, behind its earlier sessions, and never in the way."""

import logging
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from train import progress
from train.process_log import LOGS, kept_in_log
from train.progress import stage_progress

ACCELERATOR = SimpleNamespace(process_index=3, num_processes=4)
log = logging.getLogger("train.test")


def kept(run_dir: Path) -> list[str]:
    return (run_dir / LOGS / "rank3.log").read_text().splitlines()


def test_lines_have_times_and_a_continued_run_writes_on_with_the_error_at_the_end(tmp_path: Path):
    with kept_in_log(tmp_path, ACCELERATOR):  # type: ignore[arg-type]
        log.info("100 % of it")
    with pytest.raises(OSError, match="gone"), kept_in_log(tmp_path, ACCELERATOR):  # type: ignore[arg-type]
        raise OSError("the disk of https://user:pass-word@host is gone")
    log.info("behind the run")
    lines = kept(tmp_path)
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ ", line) for line in lines)
    assert [line.split(" ", 2)[2] for line in lines[1::2]] == [
        "INFO 100 % of it",
        "ERROR OSError: the disk of https://<redacted>@host is gone",
    ]
    assert all("INFO rank 3 of 4, process " in line for line in lines[::2])


def test_warnings_go_to_the_log_and_where_they_went(tmp_path: Path):
    shown = warnings.showwarning
    with pytest.warns(UserWarning, match="a doubt"), kept_in_log(tmp_path, ACCELERATOR):  # type: ignore[arg-type]
        warnings.warn("a doubt", stacklevel=1)
    assert "WARNING UserWarning: a doubt (" in kept(tmp_path)[-1]
    assert warnings.showwarning is shown


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("show", [True, False])
def test_the_log_has_plain_lines_whatever_the_screen_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool, show: bool
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)
    with kept_in_log(tmp_path, ACCELERATOR), stage_progress("training", 10, show=show) as display:  # type: ignore[arg-type]
        display.update(5, 10, "loss 0.4")
    assert kept(tmp_path)[-1].endswith("INFO training: 5 of 10 (50%)  loss 0.4")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file of Linux")
def test_a_full_disk_is_not_the_logs_to_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / LOGS).mkdir()
    (tmp_path / LOGS / "rank3.log").symlink_to("/dev/full")
    with kept_in_log(tmp_path, ACCELERATOR):  # type: ignore[arg-type]
        log.info("lost")
    assert capsys.readouterr().err == ""
