"""Memory and time of the loss over a large vocabulary.

    python -m benchmarks.loss                    # 2,048 positions, 150,000 tokens, 576 dimensions

The head is frozen, as by default: its gradient is not wanted. Peak memory is what the process takes
beyond the two heads and the states. The time stands beside one product with the head, forwards and
backwards (in states and weights), at once over all positions: what the simplest head costs without
any loss behind it.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F

from distill.chunked_head import head_loss
from distill.draft_vocab import full_vocab
from distill.losses import LossConfig, LossName
from distill.signals import TargetHead, TargetRows
from train.throughput import peak_memory_bytes

CPU = torch.device("cpu")
GIB = 2**30


def main() -> None:
    options = parse_arguments()
    positions, vocab, size = options.positions, options.vocab, options.size
    torch.manual_seed(0)
    weights = [torch.randn(vocab, size).mul_(0.05) for _ in range(2)]
    hidden = torch.randn(positions, size, requires_grad=True)
    target_states = torch.randn(positions, size)
    head = TargetHead(weights[0], full_vocab(vocab))
    rows = TargetRows(
        target_states, torch.zeros(positions), torch.zeros(positions, dtype=torch.int64)
    )
    labels = torch.arange(positions) % vocab
    config = LossConfig(name=LossName(options.loss))

    def loss() -> None:
        head_loss(hidden, weights[1], head, rows, labels, config).loss.backward()

    def product() -> None:
        weight = weights[1].detach().requires_grad_()
        F.linear(hidden, weight).sum().backward()

    (hidden[:8] @ weights[1].T).sum().backward()  # what torch itself takes for a product
    before = peak_memory_bytes(CPU)
    loss_s = seconds_of(loss, options.repeats)
    peak = peak_memory_bytes(CPU) - before
    product_s = seconds_of(product, options.repeats)
    logits = 4 * positions * vocab
    print(
        f"{torch.get_num_threads()} threads, {positions} positions x {vocab} tokens, {size} "
        f"dimensions, loss {options.loss}: peak {peak / GIB:.2f} GiB beyond the inputs (all logits: "
        f"{logits / GIB:.2f}), {loss_s:.1f} s; the product of the head forwards and backwards "
        f"{product_s:.1f} s: {loss_s / product_s:.2f} x"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument("--size", type=int, default=576, help="hidden size")
    parser.add_argument("--loss", default="lk_hybrid", choices=[name.value for name in LossName])
    parser.add_argument("--repeats", type=int, default=2)
    return parser.parse_args()


def seconds_of(run: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


if __name__ == "__main__":
    main()
