"""The structures that Python and decoder.cpp share, field for field, and typed entry points.

Their meaning is documented in decoder.cpp; here only the order and the types. `bind` compares the
sizes with the compiled ones, so that a forgotten field is an error and not a wild pointer.
"""

import ctypes
from ctypes import POINTER, c_float, c_int64, c_void_p

from torch import Tensor


class Linear(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("outputs", c_int64), ("inputs", c_int64)]


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
        ("norm_final", c_void_p), ("inverse_frequencies", c_void_p), ("head_token_ids", c_void_p),
        ("num_layers", c_int64), ("hidden_size", c_int64), ("mlp_size", c_int64),
        ("num_heads", c_int64), ("num_kv_heads", c_int64), ("head_dim", c_int64),
        ("num_logits", c_int64), ("is_bfloat16", c_int64),
        ("norm_epsilon", c_float), ("attention_scale", c_float), ("rotary_scale", c_float),
    ]  # fmt: skip


class Cache(ctypes.Structure):
    _fields_ = [("keys", c_void_p), ("values", c_void_p), ("lengths", c_void_p),
                ("batch", c_int64), ("capacity", c_int64)]  # fmt: skip


class Request(ctypes.Structure):
    _fields_ = [
        ("token_ids", c_void_p), ("num_new", c_void_p), ("cache_rows", c_void_p),
        ("positions", c_void_p), ("visible", c_void_p), ("hidden_in", c_void_p),
        ("logits", c_void_p), ("hidden_out", POINTER(c_void_p)),
        ("rows", c_int64), ("width", c_int64), ("first_layer", c_int64), ("end_layer", c_int64),
        ("last_only", c_int64), ("threads", c_int64),
    ]  # fmt: skip


def pointer(tensor: Tensor | None) -> int | None:
    """Address of a contiguous CPU tensor. The caller keeps the tensor alive."""
    if tensor is None:
        return None
    assert tensor.is_contiguous() and tensor.device.type == "cpu", (tensor.shape, tensor.device)
    return tensor.data_ptr()


def bind(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the argument types of the entry points."""
    structures = (Linear, Layer, Model, Cache, Request)
    sizes = (c_int64 * len(structures))()
    library.draftloop_sizes(sizes)
    assert list(sizes) == [ctypes.sizeof(s) for s in structures], "abi.py and decoder.cpp disagree"
    model, cache, request = POINTER(Model), POINTER(Cache), POINTER(Request)
    arguments = {
        "pack": [c_void_p, c_int64, c_int64, c_int64, c_void_p],
        "forward": [model, cache, request],
        "logits": [model, c_void_p, c_int64, c_int64, c_void_p],
        "greedy_chain": [model, cache, request, c_int64, c_void_p],
        "keep_path": [model, cache, c_int64, c_int64, c_void_p, c_int64],
    }
    for name, types in arguments.items():
        function = getattr(library, f"draftloop_{name}")
        function.argtypes, function.restype = types, None
    return library
