"""A C++ decoder for CPUs: one call runs all layers, and its results do not depend on the batch.

    from specdec_runtime import native
    if native.available() and native.NativeModel.supports(model.config) is None:
        model = native.NativeModel.from_hf(model)

For dense Llama-family decoders (llama, mistral, qwen2, qwen3). A token's logits are the same bits
whether it is decoded alone, in a batch, as one of many draft tokens or as a node of a tree; so
speculative text equals plain text exactly, not only in exact arithmetic.

There is no fallback in here: where `available()` or `supports()` says no, use `HFModel`.
"""

from specdec_runtime.native.build import BuildError, load_library
from specdec_runtime.native.engine import NativeCache, NativeModel
from specdec_runtime.native.linear import NativeLinear

__all__ = [
    "BuildError",
    "NativeCache",
    "NativeLinear",
    "NativeModel",
    "available",
    "unavailable_reason",
]


def available() -> bool:
    """Whether the decoder runs on this machine; compiles it on the first call (a few seconds)."""
    return unavailable_reason() is None


def unavailable_reason() -> str | None:
    """Why the decoder cannot run here (no compiler, a compiler error); None if it can."""
    try:
        load_library()
    except BuildError as error:
        return str(error)
    return None
