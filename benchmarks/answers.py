"""Answers at scale: killed and continued, they are those of an undisturbed run; and batches pay.

    python -m benchmarks.answers TARGET [--answers 2000] [--max-new-tokens 24]

First the throughput of writing in batches and one by one, in turns (--parts throughput), both with
lookup too (--parts lookup). Then `python -m distill.answers` twice, side by side with one thread
each: once undisturbed, and once killed (SIGKILL) three times on the way and started again (--parts
kills). Every token and every hidden state has to be the same, and every prompt answered exactly
once.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import torch

from distill.answers.authors import RuntimeAuthor
from distill.answers.config import AnswersConfig
from distill.answers.dataset import AnswerSet
from distill.answers.shards import read_shard, shard_paths
from distill.prompt_sources import squad_questions
from distill.templates import ChatTemplate
from distill.writer import Request
from specdec_runtime.loading import load_target

KILLED_AT = (2, 5, 8)  # files that the job has by then
SHARD_TOKENS = 1024
POOL = 12_000  # questions, of which the shortest are asked: the prompts are most of the work
SPARE = 1.3  # questions for each prompt: some are held out
ROUNDS, ALONE = 5, 4  # of the throughput; texts written one by one in each


def main() -> None:
    options = parse_arguments()
    shortest = sorted((text for text, _ in squad_questions(POOL, 0)), key=len)
    questions = shortest[: round(options.answers * SPARE)]
    if {"throughput", "lookup"} & set(options.parts):
        drafters = (None, "lookup") if "lookup" in options.parts else (None,)
        print_throughput(options.target, questions, options.max_new_tokens, drafters)
    if "kills" in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            print_kills(options, questions, Path(folder))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", help="folder, hub id or name of an embedded target")
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parts = ("throughput", "lookup", "kills")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    return parser.parse_args()


def print_throughput(
    name: str, questions: Sequence[str], max_new_tokens: int, drafters: Sequence[str | None]
) -> None:
    """Tokens per second, prompts and recorded states included; ratios within rounds."""
    target = load_target(name)
    print(
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"{type(target.model).__name__}, up to {max_new_tokens} new tokens\n",
        flush=True,
    )
    batch_size, template = AnswersConfig().batch_size, ChatTemplate(target.tokenizer)
    messages = ([{"role": "user", "content": text}] for text in cycle(questions))
    prompts = (template.render(message) for message in messages)
    requests = (Request(key, ids, float(key % 2), key) for key, ids in enumerate(prompts))
    found: dict[tuple[int, str | None], list[float]] = {
        (size, drafter): [] for size in (batch_size, 1) for drafter in drafters
    }
    for _ in range(ROUNDS):
        batch, alone = list(islice(requests, batch_size)), list(islice(requests, ALONE))
        for (size, drafter), values in found.items():
            config = AnswersConfig(
                batch_size=size, max_new_tokens=max_new_tokens, drafter=drafter, num_draft_tokens=2
            )
            author = RuntimeAuthor(target, template, config)
            values.append(rate(author, batch if size > 1 else alone))
    for (size, drafter), values in found.items():
        how = f"{size:3} at once, {drafter or 'plainly'}:"
        print(f"{how:24} {statistics.median(values):6.1f} tokens/s {spread(values)}")
    pairs = zip(found[batch_size, None], found[1, None], strict=True)
    ratios = [batch / alone for batch, alone in pairs]
    print(f"a batch writes {statistics.median(ratios):.2f} times as fast {spread(ratios)}\n")


def rate(author: RuntimeAuthor, requests: list[Request]) -> float:
    """Tokens per second of writing some texts."""
    writer = author.writer(len(requests))
    longest = max(len(request.prompt_ids) for request in requests)
    start = time.perf_counter()
    written = sum(len(t.token_ids) for t in writer.write(requests, longest_prompt=longest))
    return written / (time.perf_counter() - start)


def print_kills(options: argparse.Namespace, questions: Sequence[str], folder: Path) -> None:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in questions))
    command = [
        *(sys.executable, "-m", "distill.answers", f"target.model={options.target}"),
        *(f"prompts.file={prompts}", f"prompts.num_train={options.answers}"),
        *("prompts.suites=[]", f"answers.max_new_tokens={options.max_new_tokens}"),
        f"answers.shard_tokens={SHARD_TOKENS}",
    ]
    start = time.monotonic()
    undisturbed = started(command, folder / "whole")
    for number in KILLED_AT:
        found = kill_at(command, folder / "killed", number)
        print(f"{time.monotonic() - start:.0f} s: killed with {found} files written", flush=True)
    for child in (started(command, folder / "killed"), undisturbed):
        if child.wait():
            sys.exit(f"a job ended with exit code {child.returncode}")
    whole = AnswerSet.read(folder / "whole")
    print(
        f"{time.monotonic() - start:.0f} s: {len(whole.answers)} answers, {whole.num_tokens} "
        f"tokens, {len(shard_paths(folder / 'whole'))} files undisturbed, "
        f"{len(shard_paths(folder / 'killed'))} killed"
    )
    compare(whole, folder / "killed")


def started(command: list[str], output: Path) -> subprocess.Popen:
    """The job in a process of one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output.mkdir(exist_ok=True)
    log = (output / ".log").open("a")
    return subprocess.Popen([*command, f"output={output}"], stderr=log, env=environment)


def kill_at(command: list[str], output: Path, num_files: int) -> int:
    """Starts the job, kills it once it has so many files; how many there are then."""
    child = started(command, output)
    while child.poll() is None and len(shard_paths(output)) < num_files:
        time.sleep(0.05)
    if child.poll() is not None:
        sys.exit(f"the job ended by itself with exit code {child.returncode}")
    child.send_signal(signal.SIGKILL)
    child.wait()
    return len(shard_paths(output))


def compare(whole: AnswerSet, killed: Path) -> None:
    """Whether both hold the same answers; exits with 1 if not."""
    again = AnswerSet.read(killed)
    times = Counter(answer.id for path in shard_paths(killed) for answer in read_shard(path))
    same_texts = [answer.token_ids.tolist() for answer in whole.answers] == [
        answer.token_ids.tolist() for answer in again.answers
    ]
    same_states = all(
        one.rows.hidden.equal(other.rows.hidden)
        for one, other in zip(whole.answers, again.answers, strict=True)
    )
    print(
        f"killed and continued: {len(again.answers)} answers, each {set(times.values())} times; "
        f"texts equal: {same_texts}; hidden states equal: {same_states}; "
        f"fingerprints {whole.fingerprint} and {again.fingerprint}"
    )
    if not (same_texts and same_states and set(times.values()) == {1}):
        sys.exit(1)


def spread(values: Sequence[float]) -> str:
    return f"({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
