"""Which arithmetic training uses: bfloat16 autocast only where the hardware is faster with it.

Weights and optimizer moments stay float32 in every case; autocast casts inside matrix products.
float16, for GPUs without bfloat16, is never chosen by itself: its losses have to be scaled.
"""

from contextlib import AbstractContextManager, nullcontext
from enum import Enum

import torch

from specdec_runtime.machine import matmul_flops_per_s

MIN_GAIN = 1.15  # below this the casts of autocast cost more than the faster product gives back


class Precision(Enum):
    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


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
