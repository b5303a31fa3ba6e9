"""Where the jobs of a sweep leave their outcomes, told to the command line that started it."""

from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from train.sweep import forget_jobs


class SweepFolder(Callback):
    """Called by Hydra (conf/train.yaml): jobs may run in processes of a launcher, on other machines."""

    started: ClassVar[Path | None] = None  # the folder of this process's sweep

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Keeps the folder's name, which all jobs of the sweep see."""
        SweepFolder.started = Path(config.hydra.sweep.dir)
        forget_jobs(SweepFolder.started)
