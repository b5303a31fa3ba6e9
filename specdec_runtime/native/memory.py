"""Memory that the C++ decoder reads: zeros that take room only where they are touched.

Weights lie on huge pages: a pass reads all of them, and beside small pages a core spends a tenth of
that time on looking up addresses. Linux gives huge pages only to memory of this process alone, and
only where 2 MiB of it are aligned; so matrices share large blocks.
"""

import contextlib
import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2 * 2**20
_BLOCK = 64 * 2**20
_CACHE_LINE = 64


def zeros_where_touched(num_elements: int, dtype: torch.dtype) -> Tensor:
    """[num_elements] on small pages: for a cache, of which little may be used."""
    size = max(1, num_elements) * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype, count=num_elements)


class HugePages:
    """Hands out pieces of blocks on huge pages; a block is freed with the last of its pieces.

    Of its last block only what is handed out takes memory, rounded up to 2 MiB.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """[num_elements] zeros, from a cache line of its own on."""
        size = num_elements * dtype.itemsize
        whole_lines = -(-size // _CACHE_LINE) * _CACHE_LINE
        if whole_lines > len(self._free):
            self._free = _block(max(whole_lines, _BLOCK))
        taken, self._free = self._free[:size], self._free[whole_lines:]
        return taken.view(dtype)


def _block(size: int) -> Tensor:
    """[size] bytes from the beginning of a huge page on."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return zeros_where_touched(size, torch.uint8)
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + size]
