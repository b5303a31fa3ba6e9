"""While training on a CPU, a tensor takes the pages that the one before it left."""

import platform
import resource
import statistics

import pytest
import torch

from train.allocator import freed_memory_kept

BLOCK = 48 * 2**20  # bytes: larger than glibc would keep by itself
PAGE = resource.getpagesize()


def new_pages(times: int) -> float:
    """Pages that the process asks the kernel for to make one such tensor: the median of so many.

    Of the median, since something small that stays where a tensor was lets the next one find no room.
    """
    counts = []
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.zeros(BLOCK // 4).add_(1.0)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return statistics.median(counts)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_pages_are_asked_for_once_inside_and_every_time_outside():
    with freed_memory_kept("cpu") as is_kept:
        assert is_kept
        new_pages(20)  # until the heap has its size: the first few find no room large enough
        kept = new_pages(9)
    assert kept < BLOCK / PAGE / 10
    assert new_pages(9) > BLOCK / PAGE / 2  # the control: as before


def test_another_device_changes_nothing():
    with freed_memory_kept("cuda") as is_kept:
        assert not is_kept
