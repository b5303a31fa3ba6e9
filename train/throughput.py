"""Tokens a second and the memory that training takes."""

import resource
import sys
import time

import torch

RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in


class Throughput:
    """Counts a log interval; `seconds` are those of the steps, not of measuring or saving."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tokens = self._positions = 0
        self._seconds = 0.0

    def add(self, num_tokens: int, num_positions: int, *, since: float) -> float:
        """Counts a step that began at `since` (time.perf_counter); returns its seconds.

        On a device that runs behind the host a single step's time says nothing; the step that is
        logged waits for the device, so the interval's does.
        """
        seconds = time.perf_counter() - since
        self._tokens += num_tokens
        self._positions += num_positions
        self._seconds += seconds
        return seconds

    def take(self) -> dict[str, float]:
        """Rates since the last call, over all processes, and this process's peak memory.

        tokens_per_s: those that are learned from; positions_per_s: with prompts and padding.
        """
        seconds = max(self._seconds, 1e-9)
        rates = {
            "tokens_per_s": self._tokens / seconds,
            "positions_per_s": self._positions / seconds,
            "peak_memory_gib": peak_memory_bytes(self._device) / 2**30,
        }
        self._tokens = self._positions = 0
        self._seconds = 0.0
        return rates


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this process has held at once: of the GPU's memory, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
