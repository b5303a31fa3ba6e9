"""While training on a CPU, a tensor takes the pages that the one before it left."""

import json
import platform
import subprocess
import sys

import pytest

from train.allocator import freed_memory_kept

# In a process of its own: what a heap keeps depends on all that the process did before. Memory that
# is held, and not faults: those depend on the size of the system's pages.
HELD = """
import ctypes, json, resource
from train.allocator import freed_memory_kept

SIZE = 48 * 2**20  # bytes: larger than glibc would keep by itself
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / SIZE

def left_by_a_block():
    block = libc.malloc(SIZE)
    libc.memset(block, 1, SIZE)
    libc.free(block)
    return held() - start

start = held()
before = [left_by_a_block() for _ in range(3)]
with freed_memory_kept("cpu") as is_kept:
    inside = [left_by_a_block() for _ in range(5)]
print(json.dumps(dict(is_kept=is_kept, before=before, inside=inside, behind=held() - start)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_a_freed_block_stays_for_the_next_one_and_is_given_back_at_the_end():
    run = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    assert found["is_kept"]
    assert max(found["before"]) < 0.1  # the control: each is given back, and the next one new
    assert found["inside"] == pytest.approx([1.0] * 5, abs=0.1)  # one block, for all of them
    assert found["behind"] < 0.1


def test_another_device_changes_nothing():
    with freed_memory_kept("cuda") as is_kept:
        assert not is_kept
