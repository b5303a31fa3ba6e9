"""The C++ decoder beside transformers on a CPU: what one pass costs, and what the machine allows.

    python -m benchmarks.native /path/to/model          # about two minutes for a 135M model

Prints medians over rounds in which all variants take turns, so that a disturbance hits all of them.
Two limits stand beside them: reading every weight once at the measured memory bandwidth (the floor
of a pass over few tokens), and the multiply-adds at the measured rate of a large float32 product
(the floor of a pass over many). "x one" is the price of a pass in passes over one token.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec_runtime.native import NativeModel, available, unavailable_reason

CONTEXT = 128  # cached tokens before each decoding pass
DECODE_SHAPES = [(1, 1), (1, 2), (1, 4), (1, 6), (1, 8), (8, 1), (64, 1)]  # rows, new tokens a row
PREFILL_TOKENS = 512
EAGER_SHAPES = [(1, 1), (1, 4), (1, 8)]


def main() -> None:
    arguments = parse_arguments()
    if not available():
        raise SystemExit(f"the C++ decoder does not run here: {unavailable_reason()}")
    print_machine()
    module = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16).eval()
    model = NativeModel.from_hf(module)
    exact = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    check_against(exact, model)

    cases = {
        f"native: {rows} x {new}": native_pass(model, rows, new) for rows, new in DECODE_SHAPES
    }
    for name, eager in (("eager bf16", module), ("eager fp32", exact)):
        cases |= {
            f"{name}: {rows} x {new}": eager_pass(eager, rows, new) for rows, new in EAGER_SHAPES
        }
    cases[f"native prompt: {PREFILL_TOKENS}"] = native_prefill(model)
    cases["native greedy chain: 8"] = native_chain(model)
    print_table(measure(cases, arguments.rounds))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder or hub id of a supported model")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each case")
    return parser.parse_args()


def measure(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each case in each round; all cases take turns, after one warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for round_index in range(rounds + 1):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            if round_index > 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def print_table(seconds: dict[str, list[float]]) -> None:
    print(f"\n{'case':28} {'median ms':>10} {'best ms':>9} {'x one':>6} {'tokens/s':>9}")
    for name, samples in seconds.items():
        median = statistics.median(samples)
        one = seconds.get(f"{name.split(':')[0]}: 1 x 1")
        ratio = f"{median / statistics.median(one):6.2f}" if one else f"{'':6}"
        print(
            f"{name:28} {1e3 * median:10.1f} {1e3 * min(samples):9.1f} {ratio} "
            f"{num_tokens(name) / median:9.0f}"
        )


def num_tokens(name: str) -> int:
    """Tokens that a pass of this name takes in: the product of the numbers in it."""
    return math.prod(int(word) for word in name.split(":")[1].split() if word.isdigit())


def native_pass(model: NativeModel, rows: int, new: int) -> Callable[[], object]:
    cache = model.new_cache(rows, CONTEXT + new)
    model.forward(random_ids(model, rows, CONTEXT), cache, logits=False)
    ids = random_ids(model, rows, new)

    def run() -> None:
        cache.truncate([CONTEXT] * rows)
        model.forward(ids, cache)

    return run


def native_prefill(model: NativeModel) -> Callable[[], object]:
    cache = model.new_cache(1, PREFILL_TOKENS)
    ids = random_ids(model, 1, PREFILL_TOKENS)

    def run() -> None:
        cache.clear([0])
        model.forward(ids, cache, last_only=True)

    return run


def native_chain(model: NativeModel) -> Callable[[], object]:
    cache = model.new_cache(1, CONTEXT + 8)
    model.forward(random_ids(model, 1, CONTEXT), cache, logits=False)
    ids = random_ids(model, 1, 1)

    def run() -> None:
        cache.truncate([CONTEXT])
        model.greedy_chain(ids, cache, steps=8)

    return run


def eager_pass(module: PreTrainedModel, rows: int, new: int) -> Callable[[], object]:
    ids = torch.randint(0, module.config.vocab_size, (rows, CONTEXT + new))
    with torch.no_grad():
        past = module(ids[:, :CONTEXT], use_cache=True).past_key_values

    def run() -> None:
        with torch.no_grad():
            module(ids[:, CONTEXT:], past_key_values=past, use_cache=True)
        past.crop(-new)  # negative: how many to drop

    return run


def check_against(module: PreTrainedModel, model: NativeModel) -> None:
    """Largest difference to transformers in float32, and whether the greedy text is the same."""
    ids = random_ids(model, 1, 64)
    with torch.no_grad():
        expected = module(ids).logits
        text = module.generate(
            ids, max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    logits = model.forward(ids, model.new_cache(1, 64)).logits
    drafted = model.greedy_chain(ids, model.new_cache(1, 128), steps=32)
    same = torch.equal(drafted, text[:, 64:])
    difference = (logits - expected).abs().max()
    print(f"against transformers float32: logits differ by at most {difference:.1e}, "
          f"32 greedy tokens {'equal' if same else 'DIFFER'}")  # fmt: skip
    weights = sum(parameter.numel() for parameter in module.parameters())
    print(f"floor of one pass: {1e3 * weights * model.dtype.itemsize / memory_bandwidth():.1f} ms to read "
          f"the weights, {1e3 * 2 * weights / matmul_rate():.2f} ms of arithmetic a token")  # fmt: skip


def print_machine() -> None:
    print(f"{torch.get_num_threads()} threads; memory read {memory_bandwidth() / 1e9:.1f} GB/s; "
          f"float32 product {matmul_rate() / 1e9:.0f} GFLOP/s")  # fmt: skip


def memory_bandwidth() -> float:
    """Bytes a second of a sum over an array much larger than the caches: best of a few."""
    array = torch.ones(64 * 2**20)
    return array.nbytes / best_of(lambda: array.sum())


def matmul_rate() -> float:
    """Floating-point operations a second of a square float32 product: best of a few."""
    matrix = torch.ones(1024, 1024)
    return 2 * 1024**3 / best_of(lambda: matrix @ matrix)


def best_of(run: Callable[[], object], repeats: int = 7) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def random_ids(model: NativeModel, rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, model.vocab_size, (rows, length))


if __name__ == "__main__":
    main()
