"""Training speed: live and cached signals, against the machine's arithmetic and against TRL.

    python -m benchmarks.train TARGET [--steps 4] [--batch-tokens 1024] [--layers 0,1]
                               [--variants live,cached,sparse,trl]

TRL's trainer is GKDTrainer without its own sampling (lmbda=0): the one that learns from given
answers. It gets the same drafter, the very same padded batches in the same order, the same loss
(forward KL over all tokens), AdamW and float32; the losses of the first step have to agree. TRL:
pip install trl (its dependencies are those of this product).

Each variant is a process of its own, set up beside the others; then they take turns, one step at a
time, so that a machine that slows down slows all of them, and the first turn does not count. Rates
are those of the tokens that are learned from. Peak memory counts from behind the set-up on: ours
holds the target even where its signals are cached, as a run does; TRL's does not hold our engine.

The limit is what the matrix products that a variant needs would take at the rate of one large
product, measured in every turn: layers forwards and backwards (6 operations a weight and position;
2 for the target's), heads at the loss positions only. Attention itself and everything elementwise
is not counted.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.train_variants import CPU, VARIANTS, WARM_UP, Amount, Settings, Worker
from distill.signal_forms import SignalForm
from specdec_runtime.machine import matmul_flops_per_s

SAME_LOSS = 1e-3  # relative: the target's engines round differently


class Row(NamedTuple):
    """One variant: seconds of each timed step."""

    name: str
    seconds: list[float]
    amount: Amount


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker:
        settings = Settings(
            arguments.target, arguments.steps, arguments.batch_tokens, arguments.layers
        )
        Worker(settings, VARIANTS[arguments.worker]).run()
        return
    names = arguments.variants.split(",")
    if unknown := set(names) - set(VARIANTS):
        sys.exit(f"no variant {min(unknown)}; there are {', '.join(VARIANTS)}")
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(started(name, arguments)) for name in names]
        for worker in workers:
            answer_of(worker)  # set up
        rates, turns = [], []
        for turn in range(WARM_UP + arguments.steps):
            rates.append(matmul_flops_per_s(torch.float32, CPU, seconds=0.5))
            first = turn % len(workers)
            order = [*range(first, len(workers)), *range(first)]
            taken = {number: step_of(workers[number]) for number in order}
            turns.append([taken[number] for number in range(len(workers))])
        seconds = zip(*turns[WARM_UP:], strict=True)
        amounts = [Amount(**answer_of(worker)) for worker in workers]
    rows = [Row(*one) for one in zip(names, map(list, seconds), amounts, strict=True)]
    require_same_loss(rows)
    print_table(rows, median(rates), arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("target", help="folder or hub id")
    parser.add_argument("--steps", type=int, default=4, help="that count, of each variant")
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--layers", default="0,1")
    parser.add_argument("--variants", default="live,cached,sparse,trl", help=", ".join(VARIANTS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # the variant of this process
    return parser.parse_args()


@contextlib.contextmanager
def started(name: str, arguments: argparse.Namespace) -> Iterator[subprocess.Popen[str]]:
    """The process of a variant; what it says on standard error is shown if it fails."""
    command = [sys.executable, "-m", "benchmarks.train", arguments.target, "--worker", name]
    command += ["--steps", str(arguments.steps), "--batch-tokens", str(arguments.batch_tokens)]
    command += ["--layers", arguments.layers]
    with tempfile.TemporaryFile("w+") as said:
        pipe = subprocess.PIPE
        worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said, text=True)
        try:
            yield worker
        except EOFError:
            if worker.wait():
                said.seek(0)
                print(f"{name} failed:\n{said.read()}", file=sys.stderr)
            raise
        finally:
            worker.kill()
            worker.wait()


def answer_of(worker: subprocess.Popen[str]) -> Any:
    assert worker.stdout is not None
    if not (line := worker.stdout.readline()):
        raise EOFError("a variant ended before its time")
    return json.loads(line)


def step_of(worker: subprocess.Popen[str]) -> float:
    """Has a worker take its next step; seconds."""
    assert worker.stdin is not None
    worker.stdin.write("\n")
    worker.stdin.flush()
    return float(answer_of(worker))


def require_same_loss(rows: Sequence[Row]) -> None:
    """The losses over all tokens are those of one drafter, batch and formula; of the sparse form an
    estimate."""
    losses = {
        row.name: row.amount.first_loss
        for row in rows
        if VARIANTS[row.name].vocab_size is None
        and VARIANTS[row.name].form is not SignalForm.sparse
    }
    if losses and max(losses.values()) > (1 + SAME_LOSS) * min(losses.values()):
        sys.exit(f"the variants do not compute the same: first losses {losses}")


def print_table(rows: Sequence[Row], rate: float, arguments: argparse.Namespace) -> None:
    packages = [name for name in ("torch", "transformers", "trl") if name != "trl" or has_trl(rows)]
    print(
        f"{torch.get_num_threads()} threads, {rate / 1e9:.0f} GFLOP/s in a matrix product, "
        f"{', '.join(f'{name} {version(name)}' for name in packages)}, float32; layers "
        f"{arguments.layers}; {rows[0].amount.num_positions:.0f} padded tokens a step, "
        f"{rows[0].amount.num_tokens:.0f} of them learned from; {arguments.steps} steps each, in turns\n"
    )
    print(
        "| variant | tokens/s learned from | against TRL (in single turns) "
        "| share of the matrix rate | peak memory | first loss |"
    )
    print("|---|---|---|---|---|---|")
    of_trl = next((row.seconds for row in rows if VARIANTS[row.name].form is None), None)
    for name, seconds, amount in rows:
        ratio = "-"
        if of_trl is not None:
            single = [theirs / own for theirs, own in zip(of_trl, seconds, strict=True)]
            ratio = f"{sum(of_trl) / sum(seconds):.2f} x ({min(single):.2f} to {max(single):.2f})"
        mean_s = sum(seconds) / len(seconds)
        print(
            f"| {name} | {amount.num_tokens / mean_s:.0f} | {ratio} | "
            f"{amount.flops / rate / mean_s:.0%} | {amount.peak_bytes / 2**30:.1f} GiB | "
            f"{amount.first_loss:.4f} |"
        )


def has_trl(rows: Sequence[Row]) -> bool:
    return any(VARIANTS[row.name].form is None for row in rows)


if __name__ == "__main__":
    main()
