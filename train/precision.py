"""Which arithmetic training uses: bfloat16 autocast only where the hardware is faster with it.

Weights and optimizer moments stay float32 in every case; autocast casts inside matrix products.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from enum import Enum

import torch

MATMUL_SIZE = 1024
MIN_GAIN = 1.15  # below this the casts of autocast cost more than the faster product gives back


class Precision(Enum):
    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"


def matmul_flops_per_s(dtype: torch.dtype, device: torch.device, *, seconds: float = 0.3) -> float:
    """Floating-point operations per second of a square matrix product, best of the repeats."""
    a = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=dtype, device=device)
    best_s, end = float("inf"), time.perf_counter() + seconds
    torch.mm(a, a)
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * MATMUL_SIZE**3 / best_s


def autocast_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """bfloat16, or None for plain float32; `auto` measures one product in both."""
    if precision is not Precision.auto:
        return torch.bfloat16 if precision is Precision.bf16 else None
    gain = matmul_flops_per_s(torch.bfloat16, device) / matmul_flops_per_s(torch.float32, device)
    return torch.bfloat16 if gain >= MIN_GAIN else None


def autocast(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[None]:
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)
