"""Where metrics go: `metrics.jsonl` always, Weights & Biases or TensorBoard if asked.

Only the main process writes. Every other process holds a silent RunLog, so callers never test
their rank. W&B is imported only when it is used, never asks anything, and goes offline where there
is no key or no network.
"""

import json
import math
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse

from train.samples import Sample, as_html

METRICS = "metrics.jsonl"
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


class RunLog:
    """Writes one JSON object a line: `{"step": ..., "kind": ..., <name>: <value>, ...}`."""

    def __init__(
        self,
        run_dir: Path,
        tracking: TrackingConfig,
        *,
        is_main: bool,
        name: str,
        config: dict[str, Any],
    ) -> None:
        """`config`: the settings as plain values, without secrets."""
        self._file = self._wandb = self._tensorboard = None
        if not is_main:
            return
        self._path = run_dir / METRICS
        self._file = self._path.open("a")
        if tracking.tracker is Tracker.wandb and os.environ.get("WANDB_MODE") != "disabled":
            self._wandb = _start_wandb(run_dir, tracking, name=name, config=config)
        if tracking.tracker is Tracker.tensorboard:
            self._tensorboard = _start_tensorboard(run_dir)

    def continue_after(self, step: int) -> None:
        """Drops the lines of later steps, which are about to be written again; -1 drops all."""
        if self._file is not None:
            self._file.close()
            _drop_after(self._path, step)
            self._file = self._path.open("a")

    def write(self, kind: str, step: int, values: Mapping[str, Value]) -> None:
        """`kind` is the stage that speaks: training, acceptance, evaluation, ..."""
        if self._file is None:
            return
        record = {"kind": kind, "step": step, "time": round(time.time(), 3)}
        record |= {name: _json_value(value) for name, value in values.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log(_flat(kind, values), step=step)
        if self._tensorboard is not None:
            for name, value in _flat(kind, values).items():
                if not isinstance(value, str):
                    self._tensorboard.add_scalar(name, value, step)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """A table of answers with coloured tokens."""
        if self._wandb is not None and samples:
            import wandb

            rows = [[sample.prompt, wandb.Html(as_html(sample))] for sample in samples]
            table = wandb.Table(columns=["prompt", "answer"], data=rows)
            self._wandb.log({"acceptance/samples": table}, step=step)
        if self._tensorboard is not None:
            for number, sample in enumerate(samples):
                self._tensorboard.add_text(f"acceptance/sample_{number}", as_html(sample), step)

    def write_results(
        self,
        *,
        drafter: Path,
        evaluation: Path,
        inputs: Sequence[Input],
        summary: Mapping[str, Value],
        tables: Mapping[str, Rows],
    ) -> None:
        """Stores the drafter, its evaluation report and tables, with what they were made from."""
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
        for kind, folder in (("drafter", drafter), ("evaluation", evaluation)):
            name = _artifact_name(self._wandb.id, kind)
            artifact = wandb.Artifact(name, kind, metadata={**made_from, **summary})
            artifact.add_dir(str(folder))
            self._wandb.log_artifact(artifact)
        page = wandb.Html((evaluation / "report.html").read_text(), inject=False)
        found = {
            f"evaluation/{name}": wandb.Table(columns=[*rows.columns], data=rows.data)
            for name, rows in tables.items()
        }
        self._wandb.log({"evaluation/report": page, **found})

    def finish(self, *, exit_code: int, summary: Mapping[str, Value] | None = None) -> None:
        """Closes the file; marks the W&B run as finished or failed."""
        if self._file is not None:
            self._file.close()
        if self._wandb is not None:
            self._wandb.summary.update(_flat("summary", summary or {}))
            self._wandb.finish(exit_code=exit_code)
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._file = self._wandb = self._tensorboard = None


def check_tracker(tracking: TrackingConfig) -> None:
    """Raises a ValueError if what the tracker needs is not installed."""
    package = tracking.tracker.value
    if tracking.tracker is not Tracker.none and find_spec(package) is None:
        raise ValueError(
            f"tracking={package} needs the package {package}: pip install {package}, "
            "or leave tracking=none"
        )


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All complete lines; a line cut off by a kill is left out."""
    path = run_dir / METRICS
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")[:-1]  # what follows the last line break is incomplete
    return [json.loads(line) for line in lines if line]


def _artifact_name(*parts: str) -> str:
    """W&B allows letters, digits, dashes, underscores and dots."""
    return re.sub(r"[^\w.-]", "-", "-".join(parts))


def _start_tensorboard(run_dir: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run_dir / "tensorboard"))


def _drop_after(path: Path, step: int) -> None:
    kept = [record for record in read_metrics(path.parent) if record["step"] <= step]
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
    temporary.replace(path)


def _json_value(value: Value) -> Value:
    """JSON knows no NaN: what was not measured is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


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
