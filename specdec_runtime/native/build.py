"""Compiles the C++ decoder on first use and loads it.

One call of the system's C++ compiler, a few seconds, then cached under
`$XDG_CACHE_HOME/draftloop/native/<hash>` (default `~/.cache`). The hash covers the sources, the
flags, the compiler's version and the CPU, so a change of any of them builds anew and a home folder
shared by different machines holds one build for each.

The library uses the OpenMP runtime that torch has already loaded: one pool of threads for both.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch  # noqa: F401  loads torch's OpenMP runtime, which must come before ours

_log = logging.getLogger(__name__)

_SOURCES = ("simd.h", "team.h", "kernels.h", "decoder.cpp")
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++20",
    "-shared",
    "-fPIC",
    "-fopenmp",
    # The compiler must not fuse a * b + c of its own accord: where it does would differ between
    # two copies of one loop, and with it the last bit. The kernels ask for fusion by name.
    "-ffp-contract=off",
    "-fno-math-errno",
)


class BuildError(RuntimeError):
    """The decoder could not be compiled or loaded; the message says why and what to do."""


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """The compiled decoder, built if it is not in the cache.

    Raises:
        BuildError: no compiler, a compiler error, or a cache folder that cannot be written.
    """
    compiler = find_compiler()
    path = cache_folder() / build_key(compiler) / "decoder.so"
    try:
        if not path.exists():
            _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"cannot write or load the compiled decoder {path}: {error}") from error


def find_compiler() -> str:
    """The C++ compiler: `$CXX` if set, else the first of g++, c++, clang++ on the path."""
    wanted = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    for name in wanted:
        if found := shutil.which(name):
            return found
    raise BuildError(
        f"no C++ compiler found (looked for {', '.join(wanted)}); "
        "install g++ or point the environment variable CXX at one"
    )


def cache_folder() -> Path:
    """Where the builds are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "draftloop" / "native"


def build_key(compiler: str) -> str:
    """Names everything that the compiled code depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    parts = [_source(name) for name in _SOURCES]
    parts += [*_FLAGS, compiler, version.stdout, platform.machine(), _cpu_description()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _source(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="ascii")


def _cpu_description() -> str:
    """Model and instruction sets of the CPU: what -march=native looks at."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = info.read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(wanted))


def _compile(compiler: str, path: Path) -> None:
    """Builds beside the final name and renames: other processes see all of it or nothing."""
    _log.info("compiling the C++ decoder with %s (once, a few seconds)", compiler)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        source = str(Path(__file__).parent / "decoder.cpp")
        command = [compiler, *_FLAGS, source, "-o", str(built)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise BuildError(
                f"the C++ decoder did not compile. Command:\n  {' '.join(command)}\n"
                f"First lines of the compiler's message:\n{result.stderr[:1500]}"
            )
        os.replace(built, path)
