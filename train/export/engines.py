"""The serving engines of this machine: what each does with an exported folder.

An engine runs in an environment of its own (`make serving-env`), driven by a script of `drivers/` that
knows nothing of ours; prompts go in as token ids, tokens and counts come back.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec_runtime.pretrained import load_module
from specdec_runtime.stats import AcceptanceStats
from train.export import for_llamacpp, for_vllm
from train.export.gguf_model import write_gguf
from train.export.source import Source, TargetFacts

log = logging.getLogger(__name__)

# Format -> the engine that reads it. SGLang has none: it does not install without CUDA.
ENGINES = {
    "transformers": "transformers",
    "vllm": "vllm",
    "speculators": "vllm",
    "llamacpp": "llamacpp",
}
DRIVERS = Path(__file__).parent / "drivers"
_ROOM = 32  # positions that an engine may want beyond prompt and answer


@dataclass(frozen=True)
class Served:
    """What an engine did on the prompts at one temperature.

    token_ids: per prompt. rows: per prompt, its counts; without positions where it tells none.
    """

    token_ids: list[list[int]]
    rows: list[AcceptanceStats]


def environments() -> Path:
    """Where `make serving-env` puts them, unless DRAFTLOOP_SERVING_ENVS says otherwise."""
    return Path(os.environ.get("DRAFTLOOP_SERVING_ENVS", ".serving"))


def python_of(engine: str) -> Path | None:
    """The interpreter of an engine's environment; None if it is not installed."""
    if engine == "transformers":
        return Path(sys.executable)
    path = environments() / engine / "bin" / "python"
    return path if path.exists() else None


def serve(
    source: Source,
    folder: Path,
    form: str,
    prompts: Sequence[list[int]],
    work: Path,
    *,
    max_new_tokens: int,
    temperatures: Sequence[float],
) -> list[Served]:
    """Decode the prompts in the engine that reads `folder`, at each temperature.

    Args:
        form: the folder's format, one of ENGINES.
        work: for files that the engine needs besides: the target as GGUF.

    Raises:
        RuntimeError: the engine failed.
    """
    request = {
        **_models(source, folder, form, work),
        "prompts": list(prompts),
        "temperatures": list(temperatures),
        "max_new_tokens": max_new_tokens,
        "num_draft_tokens": source.num_draft_tokens,
        "context": max(map(len, prompts)) + max_new_tokens + _ROOM,
        "threads": torch.get_num_threads(),
    }
    return [_served(rows) for rows in call_driver(ENGINES[form], request)]


def _models(source: Source, folder: Path, form: str, work: Path) -> dict[str, Any]:
    if form == "llamacpp":
        target = target_gguf(source.target, work)
        return {"target": str(target), "drafter": str(folder / for_llamacpp.FILE)}
    if form == "speculators":  # names its target and draft length itself
        return {"target": str(folder), "speculative": None}
    settings = for_vllm.speculative_config(folder, source.num_draft_tokens)
    return {"target": source.target.name, "drafter": str(folder), "speculative": settings}


def target_gguf(target: TargetFacts, work: Path) -> Path:
    """The target as a float32 GGUF file in `work`, written once."""
    path = work / "target.gguf"
    if not path.exists():
        module = load_module(target.name, dtype=torch.float32, device="cpu")
        write_gguf(module, target.tokenizer, path, name="target")
    return path


def call_driver(engine: str, request: dict[str, Any], *, script: str | None = None) -> list:
    """Answers of an engine's driver; what it says of the engine itself is logged.

    Args:
        script: of `drivers/`; None = the engine's decoding.

    Raises:
        RuntimeError: the engine failed; the message is the end of what it said.
    """
    environment = dict(os.environ)
    if (request.get("speculative") or {}).get("method") == "dspark":
        environment["PYTHONPATH"] = str(DRIVERS / "triton_interpreter")
        environment["TRITON_INTERPRET"] = "1"  # before anything imports it
    done = subprocess.run(
        [str(python_of(engine)), str(DRIVERS / (script or f"drive_{engine}.py"))],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    for line in done.stdout.splitlines():
        if line.startswith("NOTE "):
            log.warning(line.removeprefix("NOTE "))
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise RuntimeError(f"{engine} failed: {done.stderr[-2000:]}")


def _served(rows: list[dict[str, Any]]) -> Served:
    counts = [
        AcceptanceStats(
            num_rounds=row["num_rounds"],
            num_accepted=row["num_accepted"],
            num_tokens=len(row["token_ids"]),
            drafted_by_position=[row["num_rounds"]] * len(row["accepted_by_position"] or []),
            accepted_by_position=row["accepted_by_position"] or [],
        )
        for row in rows
    ]
    return Served([row["token_ids"] for row in rows], counts)
