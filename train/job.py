"""What every stage of a run works with."""

import logging
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator

from train.checkpoint import Checkpoints, TrainState
from train.config import TrainConfig
from train.interrupts import StopRequest
from train.progress import StageProgress, stage_progress
from train.run_log import RunLog

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Job:
    """One run in one process; `state` exists from the training stage on."""

    config: TrainConfig
    log: RunLog
    accelerator: Accelerator
    run_dir: Path
    stop: StopRequest
    state: TrainState | None = None
    stage: str = field(default="start")

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.run_dir, keep_last=self.config.training.keep_last)

    def say(self, text: str) -> None:
        """One line for whoever watches, which the main process shows; all of them log it."""
        log.info(text)
        if self.accelerator.is_main_process:
            print(text, file=sys.stderr, flush=True)

    def progress(
        self, name: str, total: float | None = None
    ) -> AbstractContextManager[StageProgress]:
        self.stage = name
        return stage_progress(name, total, show=self.accelerator.is_main_process)

    def where(self) -> str:
        if self.state is not None and self.stage == "training":
            return f" after step {self.state.step} of {self.state.max_steps}"
        return f" during {self.stage}"
