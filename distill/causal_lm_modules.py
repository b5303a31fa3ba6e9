"""The module of a causal LM drafter before training: layers of the target, a stock model, or new.

Shapes: V vocabulary, D hidden size.
"""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specdec_runtime.layer_access import decoder_layers
from specdec_runtime.loading import load_module
from specdec_runtime.pretrained import load_tokenizer
from specdec_runtime.target import Target
from specdec_runtime.tokenizers import check_same_tokenizer


def layers_of_target(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A causal LM of the target's kind with only `layers` of its layers, in float32.

    Embeddings, final norm and head are the target's.

    Raises:
        ValueError: if the target has no such layer.
    """
    depth = target.config.num_hidden_layers
    if max(layers) >= depth:
        raise ValueError(
            f"draft.layers names layer {max(layers)}, the target has layers 0 to {depth - 1}"
        )
    module = _of_config(copy.deepcopy(target.config), layers)
    names = dict(_kept_names(target, layers))
    found = target.state_dict()
    module.load_state_dict({new: found[old].float() for new, old in names.items()}, strict=True)
    return module


def stock_model(source: str | Path, target: Target) -> PreTrainedModel:
    """A pretrained causal LM with the target's tokenizer, in float32: a smaller sibling, or a drafter
    that was trained before.

    Raises:
        ValueError: if there is no such model, or an id means something else to it.
    """
    if target.tokenizer is not None:
        check_same_tokenizer(load_tokenizer(source), target.tokenizer)
    module = load_module(source, dtype=torch.float32, device="cpu")
    rows = module.get_output_embeddings().weight.shape[0]
    if rows < target.real_vocab_size:
        raise ValueError(
            f"{source} knows {rows} tokens, the target {target.real_vocab_size}: expected a model "
            "with the target's vocabulary"
        )
    return module


def from_scratch(
    target: PreTrainedModel, *, num_layers: int, hidden_size: int | None
) -> PreTrainedModel:
    """A causal LM of the target's kind with new layers, in float32.

    Args:
        hidden_size: None = the target's, with the target's embeddings, final norm and head; another
            one has all of them new. Heads keep the target's size, so that there are fewer.

    Raises:
        ValueError: if the hidden size is no multiple of the target's head size.
    """
    if hidden_size is None:
        module = _of_config(copy.deepcopy(target.config), range(num_layers))
        prefix = _layer_prefix(target)
        rest = {k: v.float() for k, v in target.state_dict().items() if not k.startswith(prefix)}
        missing = module.load_state_dict(rest, strict=False)
        assert not missing.unexpected_keys, missing.unexpected_keys
        return module
    config = copy.deepcopy(target.config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if hidden_size % head_dim:
        raise ValueError(
            f"draft.hidden_size is {hidden_size}, expected a multiple of the target's head size "
            f"{head_dim}"
        )
    heads = hidden_size // head_dim
    groups = min(heads, config.num_attention_heads // config.num_key_value_heads)
    while heads % groups:
        groups -= 1
    config.intermediate_size = round(config.intermediate_size * hidden_size / config.hidden_size)
    config.hidden_size, config.num_attention_heads = hidden_size, heads
    config.num_key_value_heads = heads // groups
    return _of_config(config, range(num_layers))


def _of_config(config: PretrainedConfig, layers: Sequence[int]) -> PreTrainedModel:
    """A new model with as many layers as are named, of the kinds that these have in `config`."""
    types = getattr(config, "layer_types", None)
    if types:
        config.layer_types = [types[layer % len(types)] for layer in layers]
    config.num_hidden_layers = len(layers)
    config.dtype = torch.float32
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _layer_prefix(target: PreTrainedModel) -> str:
    stack = decoder_layers(target, target.config.num_hidden_layers)
    return next(name for name, part in target.named_modules() if part is stack) + "."


def _kept_names(target: PreTrainedModel, layers: Sequence[int]) -> Iterator[tuple[str, str]]:
    """(name in the drafter, name in the target) of every tensor that the drafter has."""
    prefix = _layer_prefix(target)
    for name in target.state_dict():
        if not name.startswith(prefix):
            yield name, name
            continue
        number, rest = name.removeprefix(prefix).split(".", 1)
        for new, old in enumerate(layers):
            if int(number) == old:
                yield f"{prefix}{new}.{rest}", name
