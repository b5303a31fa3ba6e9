"""While training on a CPU, memory that freed tensors leave stays with the process.

A batch of logits is larger than what glibc keeps: each such tensor is a mapping of its own, given back
when it is freed, and every page of the next one is a fault that the kernel has to zero. Where the
kernel is a virtual machine's that took half of a step. Kept instead, the same pages are used again.

These are settings of glibc; elsewhere nothing changes.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

# Of <malloc.h>: numbers of what `mallopt` sets, and what glibc has otherwise.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
KEEP_ALL = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1}  # no mapping for a single block; never shrink
USUAL = {M_MMAP_MAX: 65536, M_TRIM_THRESHOLD: 64 * 2**20}


@contextmanager
def freed_memory_kept(device_type: str) -> Iterator[bool]:
    """For the length of the block; yields whether it is so."""
    library = ctypes.CDLL(None)
    if device_type != "cpu" or not hasattr(library, "mallopt"):
        yield False
        return
    for name, value in KEEP_ALL.items():
        library.mallopt(name, value)
    try:
        yield True
    finally:
        for name, value in USUAL.items():
            library.mallopt(name, value)
        library.malloc_trim(0)
