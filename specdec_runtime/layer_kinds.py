"""What every layer of a decoder keeps of the past, and whether that can be rolled back.

Kinds are those of transformers' `layer_types`, which are also the names under which a model looks
up the mask of each layer.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from transformers import Cache, DynamicCache

# Layers that keep a state.
RECURRENT = ("linear_attention", "conv")
# Layers that do both at once, and the mask of their attention.
BOTH = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
# What can be rolled back, by the classes that transformers caches it in (older versions lack some):
# keys and values by position, or those of another layer (Dummy), and states that are kept twice.
_BY_POSITION = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
_CACHED_AS = {
    **dict.fromkeys(("full_attention", "sliding_attention", "chunked_attention"), _BY_POSITION),
    **dict.fromkeys(RECURRENT, ("LinearAttentionLayer",)),
    "hybrid": ("LinearAttentionAndFullAttentionLayer",),
    "hybrid_sliding": ("LinearAttentionAndSlidingWindowAttentionLayer",),
}
# Implementations that take a 4D mask as it is.
_MASKABLE = ("sdpa", "eager")


def is_recurrent(kinds: Sequence[str]) -> bool:
    """Whether any of the layers keeps a recurrent state or the inputs of a convolution."""
    return any(kind in RECURRENT or kind in BOTH for kind in kinds)


def checked_layer_kinds(module: Any, config: Any) -> list[str]:
    """The attention kind of every layer, after refusing what cannot be rolled back."""
    name = type(module).__name__
    if module.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model: expected a decoder-only causal LM")
    if config is not module.config or module.get_output_embeddings() is None:
        raise ValueError(
            f"{name} is multimodal or has no language-model head: load its text model alone"
        )
    implementation = config._attn_implementation
    if implementation not in _MASKABLE:
        raise ValueError(
            f"attn_implementation={implementation!r} takes no mask per row: load {name} with "
            f"attn_implementation in {_MASKABLE}"
        )
    layers = DynamicCache(config=config).layers
    kinds = getattr(config, "layer_types", None) or [
        "sliding_attention" if getattr(layer, "is_sliding", False) else "full_attention"
        for layer in layers
    ]
    for index, (kind, layer) in enumerate(zip_longest(kinds, layers)):
        if type(layer).__name__ not in _CACHED_AS.get(kind, ()):
            raise ValueError(
                f"layer {index} of {name} is of kind {kind!r} (cached as {type(layer).__name__}), "
                f"whose state cannot be rolled back: expected only {', '.join(_CACHED_AS)}"
            )
    if getattr(module, "_is_stateful", False) and not is_recurrent(kinds):
        raise ValueError(
            f"{name} keeps a state that its configuration does not name, which cannot be rolled "
            "back: expected attention, or layers of kind linear_attention or conv"
        )
    if is_recurrent(kinds) and not hasattr(Cache, "get_recurrent_state"):
        raise ValueError(
            f"{name} has recurrent layers, whose cache this version of transformers does not let "
            "others hold: install transformers 5.24 or later"
        )
    if not {*kinds} - {*RECURRENT}:
        raise ValueError(f"{name} has recurrent layers only: expected at least one attention layer")
    return list(kinds)
