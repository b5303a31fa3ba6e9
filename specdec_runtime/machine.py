"""What this machine can do, measured in a moment."""

import time

import torch

MATMUL_SIZE = 512  # small enough for hardware that has to emulate bfloat16
MIN_REPEATS = 3


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
