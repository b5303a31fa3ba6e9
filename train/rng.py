"""Every random state of a process: Python, NumPy, torch on the CPU and on each GPU."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RngState:
    """`values` is JSON, `tensors` are uint8; together they restore one process exactly."""

    values: dict[str, Any]
    tensors: dict[str, Tensor]


def capture_rng() -> RngState:
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    values = {
        "python": [version, list(numbers), gauss],
        "numpy": [
            str(name),
            np.asarray(keys).tolist(),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"cuda.{index}"] = state
    return RngState(values, tensors)


def restore_rng(state: RngState) -> None:
    version, numbers, gauss = state.values["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state.values["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state.tensors["cpu"])
    for index in range(len(state.tensors) - 1):
        torch.cuda.set_rng_state(state.tensors[f"cuda.{index}"], index)


@contextmanager
def rng_untouched() -> Iterator[None]:
    """Whatever draws inside the block leaves no trace in the random states outside."""
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(state)


def seed_everything(seed: int, rank: int = 0) -> None:
    """Different ranks draw different dropout masks; equal (seed, rank) draws the same again."""
    random.seed(seed * 100_003 + rank)
    np.random.seed((seed * 100_003 + rank) % 2**32)
    torch.manual_seed(seed * 100_003 + rank)
