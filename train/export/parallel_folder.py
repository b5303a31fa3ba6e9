"""A parallel drafter as vLLM reads it: its DSpark folder, and the rules of it.

Of the target it shares the tokenizer only: the mask is a row of the embeddings, so that they are
written with the drafter, and the head has the rows of the draft vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec_runtime.drafter_files import LAYER_IDS, read_config
from specdec_runtime.formats import write_manifest
from specdec_runtime.parallel_files import (
    ARCHITECTURE,
    COMPUTED,
    EMBEDDINGS,
    FUSION,
    LAYER_NORM,
    MASK,
    SCALE,
    STATES_NORM,
)
from train.export import rules
from train.export.eagle3_folder import layer_id_problems, vocabulary_problems, weights_dtype
from train.export.record import differences, served
from train.export.source import Source, TargetFacts

TARGET_LAYERS = "target_layer_ids"  # as vLLM counts them here: one less than ours


def parallel_obstacle(source: Source) -> str | None:
    """Why this drafter is no folder that vLLM reads; None if it is."""
    config, target = source.files.config, source.target
    if config["target_hidden_size"] != target.config.hidden_size:
        return (
            f"it reads states of size {config['target_hidden_size']}, the target's have "
            f"{target.config.hidden_size}"
        )
    if problems := layer_id_problems(config[LAYER_IDS], target):
        return problems[0]
    if mask_token_id(target) is None:
        return (
            "the engine's mask is a token, and every token of the target may occur in its text: "
            "there is none to spare"
        )
    return None


def mask_token_id(target: TargetFacts) -> int | None:
    """A token that stands in no text: padding of the head, or a control token that neither the
    template nor the end of a text uses; None if there is none."""
    if target.real_vocab_size < target.vocab_size:
        return target.vocab_size - 1
    tokenizer = target.tokenizer
    template = tokenizer.chat_template or ""
    used = {*target.eos_token_ids, tokenizer.bos_token_id, tokenizer.pad_token_id}
    spare = [
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token_id not in used and token.content not in template
    ]
    return max(spare, default=None)


def write_parallel(source: Source, folder: Path, *, engine: str, dtype: torch.dtype | None) -> None:
    """config.json, weights, the target's tokenizer and the record."""
    dtype = weights_dtype(source, dtype)
    config = {
        **source.files.config,
        "architectures": [ARCHITECTURE],
        "mask_token_id": mask_token_id(source.target),
        "dtype": str(dtype).removeprefix("torch."),
    }
    config.pop("torch_dtype", None)
    rules.write_json(folder / "config.json", config)
    save_file(
        {name: tensor.contiguous() for name, tensor in _tensors(source, config, dtype).items()},
        folder / rules.WEIGHTS,
        metadata={"format": "pt"},
    )
    source.target.tokenizer.save_pretrained(folder)
    write_manifest(folder, served(source, engine, config))


def _tensors(source: Source, config: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = dict(source.files.tensors)
    scale, mask = tensors.pop(SCALE), tensors.pop(MASK)
    tensors[FUSION] = tensors[FUSION].float() * scale.float()
    tensors[EMBEDDINGS] = tensors[EMBEDDINGS].clone()
    tensors[EMBEDDINGS][config["mask_token_id"]] = mask
    tensors[STATES_NORM] = tensors[LAYER_NORM].clone()
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    token_ids = source.files.token_ids
    if token_ids is not None:
        t2d = torch.zeros(source.target.vocab_size, dtype=torch.bool)
        t2d[token_ids] = True
        tensors |= {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": t2d}
    return tensors


def check_parallel(folder: Path, target: TargetFacts) -> list[str]:
    """What vLLM would stumble over, silently or not; empty if nothing."""
    config = read_config(folder)
    stored = rules.stored_tensors(folder)
    weights = {k: v for k, v in stored.items() if k not in ("d2t", "t2d")}
    return [
        *rules.no_pickles(folder),
        *_settings(config, target),
        *rules.same_vocab_size(config, target, "a DSpark folder"),
        *rules.same_tensors(weights, _wanted_tensors(config)),
        *_norms(folder, stored),
        *rules.dtype_as_said(weights, config),
        *rules.rope_is_complete(config),
        *vocabulary_problems(folder, stored, config, target),
        *rules.finite(folder),
        *rules.same_tokenizer(folder, target),
        *rules.recorded_target(folder, target),
        *differences(folder, config),
    ]


def _settings(config: dict[str, Any], target: TargetFacts) -> list[str]:
    problems = layer_id_problems(config.get(LAYER_IDS) or [], target)
    expected: dict[str, Any] = {
        "model_type": "qwen3",
        TARGET_LAYERS: [k - 1 for k in config.get(LAYER_IDS) or []],
        "target_hidden_size": target.config.hidden_size,
        "mask_token_id": mask_token_id(target),
        **COMPUTED,
    }
    for key, value in expected.items():
        if config.get(key) != value:
            problems.append(f"{key} is {config.get(key)}, expected {value}")
    return problems


def _norms(folder: Path, stored: dict[str, Any]) -> list[str]:
    """vLLM norms the states with a weight of its own; here it has to be the layer's."""
    if STATES_NORM not in stored or LAYER_NORM not in stored:
        return []
    if torch.equal(*(rules.stored_tensor(folder, name) for name in (STATES_NORM, LAYER_NORM))):
        return []
    return [f"{STATES_NORM} differs from {LAYER_NORM}: states were normed as the block"]


def _wanted_tensors(config: dict[str, Any]) -> dict[str, list[int]]:
    """{name: shape} as the configuration says."""
    size, inner, rank = config["hidden_size"], config["intermediate_size"], config["markov_rank"]
    head_dim = config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    vocabulary, drafted = config["vocab_size"], config["draft_vocab_size"]
    layer = {
        "self_attn.q_proj": [heads * head_dim, size],
        "self_attn.k_proj": [groups * head_dim, size],
        "self_attn.v_proj": [groups * head_dim, size],
        "self_attn.o_proj": [size, heads * head_dim],
        "self_attn.q_norm": [head_dim],
        "self_attn.k_norm": [head_dim],
        "mlp.gate_proj": [inner, size],
        "mlp.up_proj": [inner, size],
        "mlp.down_proj": [size, inner],
        "input_layernorm": [size],
        "post_attention_layernorm": [size],
    }
    wanted = {f"layers.0.{name}.weight": shape for name, shape in layer.items()}
    return wanted | {
        FUSION: [size, len(config[LAYER_IDS]) * config["target_hidden_size"]],
        STATES_NORM: [size],
        "norm.weight": [size],
        EMBEDDINGS: [vocabulary, size],
        "lm_head.weight": [drafted, size],
        "markov_head.markov_w1.weight": [vocabulary, rank],
        "markov_head.markov_w2.weight": [drafted, rank],
        "confidence_head.proj.weight": [1, size + rank],
        "confidence_head.proj.bias": [1],
    }
