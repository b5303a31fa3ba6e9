"""Where metrics go: `metrics.jsonl` always, Weights & Biases if asked. Only the main process writes.

Every other process holds a silent RunLog, so callers never test their rank.
W&B is imported only when it is used, never asks anything, and goes offline where there is no key
or no network.
"""

import json
import math
import os
import socket
import time
from dataclasses import dataclass
from enum import Enum
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

METRICS = "metrics.jsonl"
CONNECT_TIMEOUT_S = 3.0

Value = float | int | str | list[float] | None


class Tracker(Enum):
    none = "none"
    wandb = "wandb"


@dataclass(kw_only=True)
class TrackingConfig:
    tracker: Tracker = Tracker.none
    project: str = "draftloop"
    group: str | None = None
    tags: tuple[str, ...] = ()


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
        resumed_step: int | None = None,
    ) -> None:
        """`resumed_step`: lines of later steps are dropped; they are about to be written again."""
        self._file = self._wandb = None
        if not is_main:
            return
        path = run_dir / METRICS
        if resumed_step is not None and path.is_file():
            _drop_after(path, resumed_step)
        self._file = path.open("a")
        if tracking.tracker is Tracker.wandb and os.environ.get("WANDB_MODE") != "disabled":
            self._wandb = _start_wandb(run_dir, tracking, name=name, config=config)

    def write(self, kind: str, step: int, values: dict[str, Value]) -> None:
        """`kind` is the stage that speaks: training, acceptance, evaluation, ..."""
        if self._file is None:
            return
        record = {"kind": kind, "step": step, "time": round(time.time(), 3)}
        record |= {name: _json_value(value) for name, value in values.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log(_flat(kind, values), step=step)

    def finish(self, *, exit_code: int, summary: dict[str, Value] | None = None) -> None:
        """Closes the file; marks the W&B run as finished or failed."""
        if self._file is not None:
            self._file.close()
        if self._wandb is not None:
            self._wandb.summary.update(_flat("summary", summary or {}))
            self._wandb.finish(exit_code=exit_code)
        self._file = self._wandb = None


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All complete lines; a line cut off by a kill is left out."""
    path = run_dir / METRICS
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")[:-1]  # what follows the last line break is incomplete
    return [json.loads(line) for line in lines if line]


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


def _flat(kind: str, values: dict[str, Value]) -> dict[str, float | int | str]:
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
        id=f"{name}-{run_dir.name}".replace("/", "-"),
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
