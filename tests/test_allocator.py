"""While training on a CPU, a tensor takes the pages that the one before it left."""

import json
import platform
import subprocess
import sys

import pytest

from train.allocator import freed_memory_kept

# In a process of its own: what a heap keeps depends on all that the process did before.
COUNTED = """
import ctypes, json, resource
from train.allocator import freed_memory_kept

SIZE = 48 * 2**20  # bytes: larger than glibc would keep by itself
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(SIZE)
    libc.memset(block, 1, SIZE)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def pages_held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

before = [new_pages() for _ in range(5)]
with freed_memory_kept("cpu") as is_kept:
    inside = [new_pages() for _ in range(5)]
    held = pages_held()
given_back = held - pages_held()
pages = SIZE // resource.getpagesize()
print(json.dumps(dict(kept=is_kept, before=min(before) / pages, inside=max(inside[1:]) / pages,
                      given_back=given_back / pages)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_pages_are_asked_for_once_and_given_back_at_the_end():
    run = subprocess.run(
        [sys.executable, "-c", COUNTED], capture_output=True, text=True, check=True
    )
    found = json.loads(run.stdout)
    assert found["kept"]
    assert found["before"] > 0.9  # the control: every time anew
    assert found["inside"] < 0.1
    assert found["given_back"] > 0.9


def test_another_device_changes_nothing():
    with freed_memory_kept("cuda") as is_kept:
        assert not is_kept
