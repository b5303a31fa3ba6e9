"""Our runtime beside vLLM's CPU build, llama.cpp and transformers: greedy tokens a second.

    make serving-env                                    # once: their environments
    python -m train.export drafter=DIR format=vllm      # the same drafter as vLLM reads it
    python -m benchmarks.servers TARGET DIR --exported DIR_FOR_VLLM

Every program runs in a process of its own with as many threads, all loaded before the first
measurement; batches take turns, so that a disturbance hits all of them, and the first turn is not
counted. vLLM and transformers compute from bfloat16 weights, llama.cpp from float16, ours from
bfloat16 in float32. The end of a text is ignored, so all decode equally many tokens; a program's
tokens that are ours are counted (16-bit arithmetic parts at near-ties). Prefill is included.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from benchmarks.native import print_machine
from benchmarks.runtime import encoded_prompts
from specdec_runtime import SpeculativeDecoder, load_drafter, load_target
from specdec_runtime.model_names import resolve_model
from specdec_runtime.pretrained import load_module
from specdec_runtime.target import Target
from train.export.engines import DRIVERS, python_of
from train.export.for_vllm import speculative_config
from train.export.gguf_model import write_gguf

CHILDREN = Path(__file__).parent / "server_children"

Prompts = list[list[int]]
Decode = Callable[[Prompts, int], list[list[int]]]  # prompts, new tokens -> new tokens of each


class Program(NamedTuple):
    """One way to decode a batch; `largest` = how many prompts it takes at once."""

    name: str
    decode: Decode
    largest: int


def main() -> None:
    options = parse_arguments()
    exported = options.exported and speculative_config(
        Path(options.exported), options.num_draft_tokens
    )
    target = load_target(options.target)
    prompts = encoded_prompts(target, options.prompts)
    print_machine()
    with ExitStack() as stack:
        programs = [*our_programs(target, options), transformers_program(options.target)]
        programs += [*server_programs(target, prompts, exported, options, stack)]
        for batch in options.batches:
            able = [program for program in programs if program.largest >= batch]
            print_speeds(batch, measured(able, prompts, batch, options), options)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder, hub id or name of an embedded target")
    parser.add_argument("drafter", help="folder of a drafter")
    parser.add_argument("--exported", help="folder of the same drafter for vLLM")
    parser.add_argument("--num-draft-tokens", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1], help="prompts at once")
    parser.add_argument("--prompts", type=int, default=4, help="MT-bench prompts of a turn")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="let vLLM compile (minutes)")
    return parser.parse_args()


def our_programs(target: Target, options: argparse.Namespace) -> Iterable[Program]:
    drafter = load_drafter(options.drafter, target)
    largest = max(options.batches)
    for name, used, length in (
        ("ours, plain", None, 0),
        (f"ours, drafter, K={options.num_draft_tokens}", drafter, options.num_draft_tokens),
        ("ours, drafter, K=auto", drafter, "auto"),
    ):
        decoder = SpeculativeDecoder(target, used, num_draft_tokens=length)
        yield Program(name, our_decode(decoder), largest)


def our_decode(decoder: SpeculativeDecoder) -> Decode:
    def decode(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        return decoder.generate(prompts, max_new_tokens=new_tokens, eos_token_id=[]).token_ids

    return decode


def transformers_program(name: str) -> Program:
    module: Any = AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=torch.bfloat16)
    module.eval().generation_config.eos_token_id = None

    def decode(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        settings = {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": 0}
        return module.generate(ids, attention_mask=mask, **settings)[:, ids.shape[1] :].tolist()

    return Program("transformers, eager", decode, 1)


def server_programs(
    target: Target,
    prompts: Prompts,
    exported: dict[str, Any] | None,
    options: argparse.Namespace,
    stack: ExitStack,
) -> Iterable[Program]:
    """Those that are installed; `stack` ends their processes.

    Args:
        exported: what vLLM is told of the drafter's folder; None = it decodes plainly only.
    """
    work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    common = {
        "threads": torch.get_num_threads(),
        "context": max(map(len, prompts)) + options.new_tokens + 32,
        "batch": max(options.batches),
        "eager": not options.compile,
    }
    if python_of("llamacpp"):
        path = work / "target.gguf"
        module = load_module(options.target, dtype=torch.float16, device="cpu")
        write_gguf(module, target.tokenizer, path, name="target")
        decode = child("llamacpp", {**common, "target": str(path)}, stack)
        yield Program("llama.cpp f16, plain", decode, 1)
    if python_of("vllm"):
        common |= {"target": str(resolve_model(options.target))}
        decode = child("vllm", {**common, "speculative": None}, stack)
        yield Program("vLLM, plain", decode, common["batch"])
        if exported:
            decode = child("vllm", {**common, "speculative": exported}, stack)
            name = f"vLLM, drafter, K={options.num_draft_tokens}"
            yield Program(name, decode, common["batch"])


def child(engine: str, settings: dict[str, Any], stack: ExitStack) -> Decode:
    """A program of `server_children` in its engine's environment, loaded and waiting."""
    command = [str(python_of(engine)), str(CHILDREN / f"{engine}_child.py")]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
        text=True,
        env={**os.environ, "PYTHONPATH": str(DRIVERS)},
    )
    stack.enter_context(process)
    stack.callback(process.kill)
    assert process.stdin is not None
    assert process.stdout is not None
    inward, outward = process.stdin, process.stdout

    def answer_to(request: dict[str, Any], word: str) -> str:
        inward.write(json.dumps(request) + "\n")
        inward.flush()
        for line in outward:
            if line.startswith(word):
                return line.removeprefix(word)
        raise SystemExit(f"{engine} ended: see what it printed above")

    answer_to(settings, "READY")

    def decode(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        request = {"prompts": prompts, "max_new_tokens": new_tokens}
        return json.loads(answer_to(request, "RESULT "))

    return decode


class Measured(NamedTuple):
    """Of one program: seconds of each turn, and its new tokens of each prompt."""

    seconds: list[float]
    token_ids: list[list[int]]


def measured(
    programs: list[Program], prompts: Prompts, batch: int, options: argparse.Namespace
) -> dict[str, Measured]:
    """All programs over the same batches, in turns."""
    batches = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    found = {program.name: Measured([], []) for program in programs}
    for turn in range(options.turns + 1):
        for program in programs:
            start = time.perf_counter()
            texts = [ids for part in batches for ids in program.decode(part, options.new_tokens)]
            if turn:
                found[program.name].seconds.append(time.perf_counter() - start)
            found[program.name].token_ids[:] = texts
    return found


def print_speeds(batch: int, found: dict[str, Measured], options: argparse.Namespace) -> None:
    """A row a program: tokens a second, against our plain decoding and against vLLM's."""
    ours = found["ours, plain"]
    medians = {name: statistics.median(one.seconds) for name, one in found.items()}
    print(f"\nbatch {batch}: {options.prompts} prompts x {options.new_tokens} new tokens")
    print(
        f"{'program':28} {'tokens/s':>8} {'range':>14} {'of ours, plain':>14} {'same tokens':>11}"
    )
    for name, one in found.items():
        tokens = sum(map(len, one.token_ids))
        rates = sorted(tokens / seconds for seconds in one.seconds)
        same = sum(
            a == b
            for mine, theirs in zip(ours.token_ids, one.token_ids, strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )
        print(
            f"{name:28} {tokens / medians[name]:8.1f} {f'{rates[0]:.1f} to {rates[-1]:.1f}':>14} "
            f"{medians['ours, plain'] / medians[name]:14.2f} {same / tokens:11.0%}"
        )


if __name__ == "__main__":
    main()
