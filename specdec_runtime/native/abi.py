"""The structures that Python and decoder.cpp share, field for field, and typed entry points.

Their meaning is documented in decoder.cpp; here only the order and the types. `decoder` compares
the sizes with the compiled ones, so that a forgotten field is an error and not a wild pointer.
"""

import ctypes
from collections.abc import Sequence
from ctypes import CFUNCTYPE, POINTER, c_float, c_int64, c_void_p
from functools import lru_cache

import torch
from torch import Tensor

from specdec_runtime.native.build import load_library

Indices = Sequence[int] | Tensor
Proceed = CFUNCTYPE(c_int64)


class Linear(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("scale", c_void_p), ("bias", c_void_p),
                ("outputs", c_int64), ("inputs", c_int64)]  # fmt: skip


class Layer(ctypes.Structure):
    _fields_ = [
        ("qkv", Linear), ("attention_out", Linear), ("gate_up", Linear), ("down", Linear),
        ("norm_attention", c_void_p), ("norm_mlp", c_void_p),
        ("norm_query", c_void_p), ("norm_key", c_void_p),
        ("window", c_int64),
    ]  # fmt: skip


class Model(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(Layer)), ("head", Linear), ("embedding", c_void_p),
        ("norm_final", c_void_p), ("norm_embedding", c_void_p), ("inverse_frequencies", c_void_p),
        ("head_token_ids", c_void_p),
        ("num_layers", c_int64), ("hidden_size", c_int64), ("mlp_size", c_int64),
        ("num_heads", c_int64), ("num_kv_heads", c_int64), ("head_dim", c_int64),
        ("num_logits", c_int64), ("weight_type", c_int64),
        ("norm_epsilon", c_float), ("attention_scale", c_float), ("rotary_scale", c_float),
    ]  # fmt: skip


class Cache(ctypes.Structure):
    _fields_ = [("keys", c_void_p), ("values", c_void_p), ("lengths", c_void_p),
                ("batch", c_int64), ("capacity", c_int64)]  # fmt: skip


class Request(ctypes.Structure):
    _fields_ = [
        ("token_ids", c_void_p), ("num_new", c_void_p), ("cache_rows", c_void_p),
        ("positions", c_void_p), ("visible", c_void_p), ("hidden_in", c_void_p),
        ("logits", c_void_p), ("likeliest", c_void_p), ("hidden_out", POINTER(c_void_p)),
        ("rows", c_int64), ("width", c_int64), ("first_layer", c_int64), ("end_layer", c_int64),
        ("last_only", c_int64), ("num_choices", c_int64), ("threads", c_int64),
    ]  # fmt: skip


def as_int64(values: Indices) -> Tensor | ctypes.Array:
    """The numbers as decoder.cpp reads its indices. A list becomes an array of ctypes: a small tensor
    would take ten times as long to make."""
    if not isinstance(values, Tensor):
        return (c_int64 * len(values))(*values)
    return (values if values.dtype is torch.int64 else values.to(torch.int64)).contiguous()


def pointer(values: Tensor | ctypes.Array) -> int:
    """Address of a contiguous CPU tensor or an array. The caller keeps it alive."""
    if isinstance(values, ctypes.Array):
        return ctypes.addressof(values)
    assert values.is_contiguous(), values.stride()
    assert values.is_cpu, values.device
    return values.data_ptr()


def listed(values: Indices | ctypes.Array) -> list[int]:
    return values.tolist() if isinstance(values, Tensor) else list(values)


@lru_cache(maxsize=1)
def decoder() -> ctypes.CDLL:
    """The compiled decoder with typed entry points; built on the first call if need be.

    Raises:
        BuildError: it cannot be built here.
    """
    library = load_library()
    structures = (Linear, Layer, Model, Cache, Request)
    sizes = (c_int64 * len(structures))()
    library.draftloop_sizes(sizes)
    assert list(sizes) == [ctypes.sizeof(s) for s in structures], "abi.py and decoder.cpp disagree"
    model, cache, request = POINTER(Model), POINTER(Cache), POINTER(Request)
    arguments = {
        "pack": [c_void_p, c_int64, c_int64, c_int64, c_void_p],
        "check": [cache, request, c_int64, c_int64, c_int64, POINTER(c_int64)],
        "forward": [model, cache, request],
        "logits": [model, c_void_p, c_int64, c_int64, c_void_p],
        "normed_logits": [model, POINTER(c_void_p), c_int64, c_void_p, c_int64, c_int64, c_void_p],
        "greedy_chain": [model, cache, request, c_int64, c_void_p, c_void_p, Proceed],
        "keep_path": [model, cache, c_int64, c_int64, c_void_p, c_int64],
    }
    for name, types in arguments.items():
        function = getattr(library, f"draftloop_{name}")
        function.argtypes = types
        function.restype = c_int64 if name in ("check", "greedy_chain") else None
    return library
