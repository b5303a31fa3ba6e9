"""Trackers: Weights & Biases or TensorBoard, for training and for an evaluation alone.

W&B is imported only when it is used, never asks anything, and goes offline where there is no key or
no network.
"""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse

CONNECT_TIMEOUT_S = 3.0

Value = float | int | str | list[float] | None


class Tracker(Enum):
    none = "none"
    wandb = "wandb"
    tensorboard = "tensorboard"


@dataclass(kw_only=True)
class TrackingConfig:
    tracker: Tracker = Tracker.none
    project: str = "draftloop"
    group: str | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Input:
    """What a run was made from, for lineage: type "target" or "dataset"."""

    type: str
    name: str
    fingerprint: str


class Rows(NamedTuple):
    """A table; numbers stay numbers, so that a tracker can plot them."""

    columns: list[str]
    data: list[list[Any]]  # numbers, text, None


class Trackers:
    """The tracker that is asked for; without one everything here does nothing.

    Args:
        folder: of the run; its name is part of the run's id, so that a resumed run goes on.
        config: the settings as plain values, without secrets.
    """

    def __init__(
        self, folder: Path, tracking: TrackingConfig, *, name: str, config: dict[str, Any]
    ) -> None:
        self._wandb = self._tensorboard = None
        if tracking.tracker is Tracker.wandb and os.environ.get("WANDB_MODE") != "disabled":
            self._wandb = _start_wandb(folder, tracking, name=name, config=config)
        if tracking.tracker is Tracker.tensorboard:
            self._tensorboard = _start_tensorboard(folder)

    def write(self, kind: str, step: int, values: Mapping[str, Value]) -> None:
        """One point of each curve `kind/name`."""
        if self._wandb is not None:
            self._wandb.log(_flat(kind, values), step=step)
        if self._tensorboard is not None:
            for name, value in _flat(kind, values).items():
                if not isinstance(value, str):
                    self._tensorboard.add_scalar(name, value, step)

    def write_samples(self, step: int, samples: Sequence[tuple[str, str]]) -> None:
        """A table of prompts and answers, these as HTML."""
        if self._wandb is not None and samples:
            import wandb

            rows = [[prompt, wandb.Html(answer)] for prompt, answer in samples]
            table = wandb.Table(columns=["prompt", "answer"], data=rows)
            self._wandb.log({"acceptance/samples": table}, step=step)
        if self._tensorboard is not None:
            for number, (_, answer) in enumerate(samples):
                self._tensorboard.add_text(f"acceptance/sample_{number}", answer, step)

    def write_results(
        self,
        *,
        folders: Mapping[str, Path],
        report: Path,
        inputs: Sequence[Input],
        summary: Mapping[str, Value],
        tables: Mapping[str, Rows],
    ) -> None:
        """Stores folders by their kind, the report and its tables, with what they were made from."""
        if self._wandb is None:
            return
        import wandb

        made_from = {f"{one.type}_fingerprint": one.fingerprint for one in inputs}
        for one in inputs:
            record = wandb.Artifact(
                _artifact_name(one.type, one.fingerprint[:12]), one.type, metadata=vars(one)
            )
            if not self._wandb.offline:  # offline only metadata can say what was used
                self._wandb.use_artifact(record)
        for kind, folder in folders.items():
            name = _artifact_name(self._wandb.id, kind)
            artifact = wandb.Artifact(name, kind, metadata={**made_from, **summary})
            for path in _files_of(folder):
                artifact.add_file(str(path), name=path.relative_to(folder).as_posix())
            self._wandb.log_artifact(artifact)
        page = wandb.Html(report.read_text(), inject=False)
        found = {
            f"evaluation/{name}": wandb.Table(columns=[*rows.columns], data=rows.data)
            for name, rows in tables.items()
        }
        self._wandb.log({"evaluation/report": page, **found})

    def finish(self, *, exit_code: int, summary: Mapping[str, Value]) -> None:
        """Marks the W&B run as finished or failed."""
        if self._wandb is not None:
            self._wandb.summary.update(_flat("summary", summary))
            self._wandb.finish(exit_code=exit_code)
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._wandb = self._tensorboard = None


def check_tracker(tracking: TrackingConfig) -> None:
    """Raises a ValueError if what the tracker needs is not installed."""
    package = tracking.tracker.value
    if tracking.tracker is not Tracker.none and find_spec(package) is None:
        raise ValueError(
            f"tracking={package} needs the package {package}: pip install {package}, "
            "or leave tracking=none"
        )


def _files_of(folder: Path) -> list[Path]:
    """All but what the trackers keep there themselves."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    own = {Tracker.wandb.value, Tracker.tensorboard.value}
    return [path for path in files if path.relative_to(folder).parts[0] not in own]


def _artifact_name(*parts: str) -> str:
    """W&B allows letters, digits, dashes, underscores and dots."""
    return re.sub(r"[^\w.-]", "-", "-".join(parts))


def _start_tensorboard(run_dir: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run_dir / "tensorboard"))


def _flat(kind: str, values: Mapping[str, Value]) -> dict[str, float | int | str]:
    """`kind/name`, lists as `kind/name_1`, ...; nothing for what was not measured."""
    flat: dict[str, float | int | str] = {}
    for name, value in values.items():
        if isinstance(value, list):
            flat |= {f"{kind}/{name}_{i}": item for i, item in enumerate(value, start=1)}
        elif value is not None:
            flat[f"{kind}/{name}"] = value
    return flat


def _start_wandb(
    run_dir: Path, tracking: TrackingConfig, *, name: str, config: dict[str, Any]
) -> Any:
    """One run per training: the folder's name is the id, so a resumed run continues its curves."""
    import wandb

    offline = os.environ.get("WANDB_MODE") == "offline" or not _wandb_reachable(wandb)
    return wandb.init(
        project=tracking.project,
        group=tracking.group,
        tags=list(tracking.tags),
        name=f"{name}/{run_dir.name}",
        id=_artifact_name(name, run_dir.name),
        resume="allow",
        dir=run_dir,
        config=config,
        mode="offline" if offline else "online",
        settings=wandb.Settings(silent=True, console="off"),
    )


def _wandb_reachable(wandb: Any) -> bool:
    """True if there is a key and the server answers; nothing is sent and nobody is asked."""
    address = urlparse(wandb.Settings().base_url)
    if not (os.environ.get("WANDB_API_KEY") or _in_netrc(address.hostname or "")):
        return False
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _in_netrc(host: str) -> bool:
    """Whether `wandb login` has stored a key for this host."""
    try:
        stored = netrc(os.environ.get("NETRC", Path.home() / ".netrc"))
    except (OSError, NetrcParseError):
        return False
    return stored.authenticators(host) is not None
