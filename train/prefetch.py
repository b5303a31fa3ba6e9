"""The next micro-batch is made, and copied to the device, while the present one is worked on."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from distill.batches import Batch


class Stream(Protocol):
    """Micro-batches by number: equal numbers, equal batches."""

    def __call__(self, number: int) -> Batch: ...


class Prefetching:
    """The same batches as `stream`, which only a thread of this object calls.

    Args:
        stride: from a number asked for to the next one; the process count, since the micro-batches
            of a step go round the processes.
    """

    def __init__(self, stream: Stream, *, stride: int, device: torch.device) -> None:
        self._stream, self._stride, self._device = stream, stride, device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._coming: dict[int, Future[Batch]] = {}

    def __call__(self, number: int) -> Batch:
        batch = self._coming.pop(number, None) or self._thread.submit(self._make, number)
        for other in self._coming.values():
            other.cancel()  # the step time is measured on batches that are not the next ones
        following = number + self._stride
        self._coming = {following: self._thread.submit(self._make, following)}
        return batch.result()

    def _make(self, number: int) -> Batch:
        return self._stream(number).to(self._device)
