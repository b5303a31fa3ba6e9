"""Which arithmetic training uses: bfloat16 autocast only where the hardware is faster with it.

Weights and optimizer moments stay float32 in every case; autocast casts inside matrix products.
float16, for GPUs without bfloat16, is never chosen by itself: its losses have to be scaled.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from enum import Enum

import torch

MATMUL_SIZE = 512  # small enough for hardware that has to emulate bfloat16
MIN_REPEATS = 3
MIN_GAIN = 1.15  # below this the casts of autocast cost more than the faster product gives back


class Precision(Enum):
    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def matmul_flops_per_s(dtype: torch.dtype, device: torch.device, *, seconds: float = 0.1) -> float:
    """Floating-point operations per second of a square matrix product, best of the repeats."""
    a = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=dtype, device=device)
    times: list[float] = []
    end = time.perf_counter() + seconds
    torch.mm(a, a)
    while len(times) < MIN_REPEATS or time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * MATMUL_SIZE**3 / min(times)


def resolved(precision: Precision, device: torch.device) -> Precision:
    """What was asked for; `auto` measures one product in fp32 and bf16."""
    if precision is not Precision.auto:
        return precision
    gain = matmul_flops_per_s(torch.bfloat16, device) / matmul_flops_per_s(torch.float32, device)
    return Precision.bf16 if gain >= MIN_GAIN else Precision.fp32


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    assert precision is not Precision.auto, "resolve it first"
    if precision is Precision.fp32:
        return nullcontext()
    dtype = torch.float16 if precision is Precision.fp16 else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype)
