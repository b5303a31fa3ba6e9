"""Jobs that SIGKILL ends at a place of their own, so that no test depends on who is faster."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch

from distill import durable

HANGS_AFTER_S = 120.0


def killed(job: Callable[[], object], *, at: int) -> None:
    """Runs a job in another process that dies in its `at`-th wait for the disk.

    A shard has two: for the file, which is still hidden then, and, behind the rename, for its folder.
    """

    def run() -> None:
        torch.set_num_threads(1)
        flush, waits = durable._flush, 0

        def flush_or_die(path: Path) -> None:
            nonlocal waits
            waits += 1
            if waits == at:
                os.kill(os.getpid(), signal.SIGKILL)
            flush(path)

        durable._flush = flush_or_die
        job()

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(HANGS_AFTER_S)  # the fork of a process with threads may hang; it is killed just so
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL, "the job ended before it was to be killed"
