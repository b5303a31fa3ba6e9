"""While training on a CPU, a tensor takes the pages that the one before it left."""

import platform
import resource

import pytest
import torch

from train.allocator import freed_memory_kept

BLOCK = 48 * 2**20  # bytes: larger than glibc would keep by itself


def new_pages(times: int) -> int:
    """How many pages the process asks the kernel for while it makes so many tensors in turn."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.zeros(BLOCK // 4).add_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_pages_are_asked_for_once_inside_and_every_time_outside():
    with freed_memory_kept("cpu") as is_kept:
        assert is_kept
        new_pages(2)
        kept = new_pages(3)
    assert kept < BLOCK / 4096 / 10
    assert new_pages(3) > 10 * max(kept, 100)  # the control: as before


def test_another_device_changes_nothing():
    with freed_memory_kept("cuda") as is_kept:
        assert not is_kept
