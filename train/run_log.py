"""Where metrics go: `metrics.jsonl` always, and the tracker that is asked for (eval/trackers.py).

Only the main process writes. Every other process holds a silent RunLog, so callers never test
their rank.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.trackers import Input, Rows, Trackers, TrackingConfig, Value
from train.samples import Sample, as_html

METRICS = "metrics.jsonl"


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
        self._file = self._trackers = None
        if not is_main:
            return
        self._path = run_dir / METRICS
        self._file = self._path.open("a")
        self._trackers = Trackers(run_dir, tracking, name=name, config=config)

    def continue_after(self, step: int) -> None:
        """Drops the lines of later steps, which are about to be written again; -1 drops all."""
        if self._file is not None:
            self._file.close()
            _drop_after(self._path, step)
            self._file = self._path.open("a")

    def write(self, kind: str, step: int, values: Mapping[str, Value]) -> None:
        """`kind` is the stage that speaks: training, acceptance, evaluation, ..."""
        if self._file is None or self._trackers is None:
            return
        record = {"kind": kind, "step": step, "time": round(time.time(), 3)}
        record |= {name: _json_value(value) for name, value in values.items()}
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(f"{self._path} could not be written: {error}") from error
        self._trackers.write(kind, step, values)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """A table of answers with coloured tokens."""
        if self._trackers is not None:
            self._trackers.write_samples(step, [(one.prompt, as_html(one)) for one in samples])

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
        if self._trackers is not None:
            self._trackers.write_results(
                folders={"drafter": drafter, "evaluation": evaluation},
                report=evaluation / "report.html",
                inputs=inputs,
                summary=summary,
                tables=tables,
            )

    def finish(self, *, exit_code: int, summary: Mapping[str, Value] | None = None) -> None:
        """Closes the file; marks the tracker's run as finished or failed."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk, which `write` has reported
                self._file.close()
        if self._trackers is not None:
            self._trackers.finish(exit_code=exit_code, summary=summary or {})
        self._file = self._trackers = None


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
