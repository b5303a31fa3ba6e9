"""What a run is about to do and how long each stage will take, said before it starts.

The estimates come from two rates of this machine, measured in about two seconds, and the sizes at
hand; they are right within a factor of two. The training stage is planned by its own time budget.
"""

import os
import time
from dataclasses import dataclass

import torch

from train.precision import matmul_flops_per_s
from train.progress import duration
from train.provenance import cpu_name

COPY_BYTES = 64 << 20  # larger than the last-level cache that a virtual core gets
# Measured: share of the matrix rate that small products of a decoder reach.
DECODE_EFFICIENCY = 0.35
PREFILL_EFFICIENCY = 0.5


@dataclass(frozen=True)
class Machine:
    """Rates of the device that will do the work."""

    name: str
    flops_per_s: float  # float32 matrix product
    bytes_per_s: float  # reading memory


@dataclass(frozen=True)
class PlannedStage:
    name: str
    seconds: float
    note: str = ""


def measure_machine(device: torch.device) -> Machine:
    """Takes about two seconds."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{os.cpu_count()} cores of {cpu_name()}"
    return Machine(
        name, matmul_flops_per_s(torch.float32, device, seconds=1.0), _bytes_per_s(device)
    )


def decode_s(
    machine: Machine, num_tokens: float, *, num_parameters: int, batch_size: int, bytes_each: int
) -> float:
    """Seconds to write `num_tokens` with a model of `num_parameters`, `batch_size` rows at once:
    a pass reads every weight once and multiplies it with every row."""
    read_s = num_parameters * bytes_each / machine.bytes_per_s
    multiply_s = 2 * num_parameters * batch_size / (machine.flops_per_s * DECODE_EFFICIENCY)
    return num_tokens / batch_size * max(read_s, multiply_s)


def describe(machine: Machine, stages: list[PlannedStage]) -> str:
    """The plan as lines of text."""
    width = max(len(stage.name) for stage in stages)
    lines = [
        f"  {stage.name:{width}}  about {duration(stage.seconds):>12}   {stage.note}".rstrip()
        for stage in stages
    ]
    total = duration(sum(stage.seconds for stage in stages))
    head = f"Plan on {machine.name} ({machine.flops_per_s / 1e9:.0f} GFLOP/s): about {total}"
    return "\n".join([head, *lines])


def _bytes_per_s(device: torch.device, *, seconds: float = 0.5) -> float:
    """Reading rate of memory, best of the repeats."""
    block = torch.ones(COPY_BYTES // 4, device=device)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        block.sum()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return COPY_BYTES / min(times)
