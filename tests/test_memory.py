"""Memory of the C++ decoder: pieces of their own, on huge pages where the kernel has them."""

import re
from pathlib import Path

import pytest
import torch

from specdec_runtime.native.memory import HugePages, zeros_where_touched

SMAPS = Path("/proc/self/smaps")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_of(address):
    """What the kernel was told about the mapping that holds an address (proc(5), VmFlags)."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("the address is not mapped")


def test_pieces_are_zeros_on_cache_lines_of_their_own():
    pages = HugePages()
    pieces = [pages.take(n, dtype) for n in (5, 64, 1) for dtype in (torch.int8, torch.float32)]
    assert all(not piece.any() and piece.data_ptr() % 64 == 0 for piece in pieces)
    for number, piece in enumerate(pieces, 1):
        piece.fill_(number)
    assert [set(piece.tolist()) for piece in pieces] == [{n} for n in range(1, len(pieces) + 1)]


def test_a_piece_larger_than_what_is_left_begins_a_block():
    pages = HugePages()
    first, large = pages.take(3, torch.int8), pages.take(65 * 2**20, torch.int8)
    assert len(large) == 65 * 2**20
    assert {piece.data_ptr() % 2**21 for piece in (first, large)} == {0}


@pytest.mark.skipif(not SMAPS.exists() or not HUGE_PAGES.exists(), reason="no such Linux kernel")
def test_blocks_ask_for_huge_pages_in_memory_of_this_process_alone():
    weights, cache = HugePages().take(100, torch.bfloat16), zeros_where_touched(100, torch.float32)
    assert "hg" in flags_of(weights.data_ptr())
    assert "sh" not in flags_of(weights.data_ptr())
    assert "hg" not in flags_of(cache.data_ptr())
