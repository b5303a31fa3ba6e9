"""One drafter through our runtime and through each engine: texts and acceptance side by side.

    python -m tests.serving.side_by_side DRAFTER_FOLDER [--engines transformers,llamacpp,vllm]

Everything in float32. The engines run in the environments of `make serving-env`. Prints the table of
docs/serving.md. Exit code 1 if an engine's text is not plain greedy decoding, near-ties apart, or its
acceptance length is further than 0.1 from ours.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eval.acceptance import length_interval, measure_acceptance, position_intervals
from specdec_runtime.loading import load_drafter, load_target
from specdec_runtime.pretrained import load_module
from specdec_runtime.target import Target
from train.export.exporting import export
from train.export.gguf_model import write_gguf
from train.export.observation import fixed_prompts
from train.export.source import Source, read_source

HERE = Path(__file__).parent
NEAR_TIE = 2e-3  # of logits around 20: 1e-4 of them, as sums in another order differ
ALLOWED = 0.1


@dataclass(frozen=True)
class Served:
    """What one engine did on the prompts."""

    engine: str
    token_ids: list[list[int]]
    num_accepted: int
    num_rounds: int
    accepted_by_position: list[int] | None

    @property
    def acceptance_length(self) -> float:
        return 1 + self.num_accepted / self.num_rounds


def python_of(engine: str) -> Path | None:
    """The interpreter of an engine's environment; None if it is not installed."""
    if engine == "transformers":
        return Path(sys.executable)
    path = Path(os.environ.get("DRAFTLOOP_SERVING_ENVS", ".serving")) / engine / "bin" / "python"
    return path if path.exists() else None


def call_driver(engine: str, request: dict) -> list:
    """Answers of an engine's driver.

    Raises:
        RuntimeError: the engine failed; the message is the end of what it said.
    """
    done = subprocess.run(
        [str(python_of(engine)), str(HERE / f"drive_{engine}.py")],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise RuntimeError(f"{engine} failed: {done.stderr[-2000:]}")


def serve(
    engine: str,
    source: Source,
    prompts: Sequence[list[int]],
    work: Path,
    *,
    max_new_tokens: int,
    with_drafter: bool = True,
) -> Served:
    """Export the drafter for an engine and decode the prompts there."""
    target, drafter = source.target.name, None
    if with_drafter:
        done = export(
            source.files.folder,
            work / engine,
            engine=engine,
            target=source.target.record,
            num_draft_tokens=source.num_draft_tokens,
            dtype=torch.float32,
        )
        drafter = str(done.folder)
    if engine == "llamacpp":
        target = str(target_gguf(source, work))
        drafter = drafter and f"{drafter}/drafter.gguf"
    request = {
        "target": target,
        "drafter": drafter,
        "prompts": list(prompts),
        "max_new_tokens": max_new_tokens,
        "num_draft_tokens": source.num_draft_tokens,
        "context": max(map(len, prompts)) + max_new_tokens + 32,
        "threads": torch.get_num_threads(),
        "method": "eagle3" if source.kind == "eagle3" else "draft_model",
    }
    rows = call_driver(engine, request)
    by_position = [row["accepted_by_position"] for row in rows]
    known = all(part is not None for part in by_position)
    width = max(map(len, by_position)) if known else 0
    return Served(
        engine,
        [row["token_ids"] for row in rows],
        sum(row["num_accepted"] for row in rows),
        sum(row["num_rounds"] for row in rows),
        [sum(p[i] for p in by_position if i < len(p)) for i in range(width)] if known else None,
    )


def target_gguf(source: Source, work: Path) -> Path:
    """The target as a float32 GGUF file, written once."""
    path = work / "target.gguf"
    if not path.exists():
        module = load_module(source.target.name, dtype=torch.float32, device="cpu")
        write_gguf(module, source.target.tokenizer, path, name="target")
    return path


def first_differences(
    target: Target, prompts: Sequence[list[int]], plain: list[list[int]], texts: list[list[int]]
) -> list[tuple[int, int, float]]:
    """(prompt, position, top-two gap of the target there) of each text that is not the plain one.

    A text that only ends elsewhere (an engine that keeps or drops the end token) is the same.
    """
    found = []
    for number, (prompt, ours, theirs) in enumerate(zip(prompts, plain, texts, strict=True)):
        pairs = enumerate(zip(ours, theirs, strict=False))
        position = next((i for i, (a, b) in pairs if a != b), None)
        if position is not None:
            tokens = torch.tensor([[*prompt, *ours[:position]]])
            cache = target.model.new_cache(1, tokens.shape[1])
            logits = target.model.forward(tokens, cache, last_only=True).logits
            assert logits is not None
            top = logits[0, 0].topk(2).values
            found.append((number, position, float(top[0] - top[1])))
    return found


def compare(
    drafter: Path, engines: Sequence[str], *, max_new_tokens: int, number: int, num_prompts: int
) -> int:
    """Prints the table; the number of engines that differ."""
    source = read_source(drafter, target=None, num_draft_tokens=number)
    target = load_target(source.target.record, dtype=torch.float32)
    prompts = fixed_prompts(target, source.manifest.template_options)[:num_prompts]
    settings = {"num_draft_tokens": source.num_draft_tokens, "max_new_tokens": max_new_tokens}
    plain = measure_acceptance(target, None, prompts, **settings).token_ids
    ours = measure_acceptance(target, load_drafter(drafter, target), prompts, **settings)
    interval = length_interval(ours.prompts)
    print("| engine | same text as plain greedy | acceptance length | by position |")
    print("|---|---|---|---|")
    print(
        f"| ours | {len(prompts)} of {len(prompts)} | {interval.value:.3f} "
        f"({interval.low:.3f} to {interval.high:.3f}) | "
        + " ".join(f"{one.value:.3f}" for one in position_intervals(ours.prompts))
        + " |"
    )
    failures = 0
    with tempfile.TemporaryDirectory() as work:
        for engine in engines:
            served = serve(engine, source, prompts, Path(work), max_new_tokens=max_new_tokens)
            different = first_differences(target, prompts, plain, served.token_ids)
            print(row_of(served, len(prompts), different), flush=True)
            is_wrong = any(gap > NEAR_TIE for _, _, gap in different)
            is_far = abs(served.acceptance_length - ours.acceptance_length) > ALLOWED
            failures += is_wrong or is_far
    return failures


def row_of(served: Served, num_prompts: int, different: list[tuple[int, int, float]]) -> str:
    same = f"{num_prompts - len(different)} of {num_prompts}"
    if different:
        gaps = ", ".join(f"{gap:.2e}" for _, _, gap in different)
        same += f" (top-two gap where the others part: {gaps})"
    positions = served.accepted_by_position
    shares = [f"{count / served.num_rounds:.3f}" for count in positions or []]
    return (
        f"| {served.engine} | {same} | {served.acceptance_length:.3f} | "
        f"{' '.join(shares) if shares else 'not reported'} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--engines", default="transformers,llamacpp,vllm")
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=12)
    given = parser.parse_args()
    return bool(
        compare(
            given.drafter,
            given.engines.split(","),
            max_new_tokens=given.max_new_tokens,
            number=given.num_draft_tokens,
            num_prompts=given.num_prompts,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
