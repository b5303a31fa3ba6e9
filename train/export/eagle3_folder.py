"""An EAGLE-3 head as the engines read it: the tensors, the configuration, and their rules.

The three forms differ in where the layer ids stand and how they count, in what a missing flag means
and in the names of the layer's tensors; what is common is here.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec_runtime.drafter_files import (
    EAGLE3_FLAGS,
    LAYER_IDS,
    draft_vocab_problem,
    native_config,
    read_config,
)
from specdec_runtime.formats import write_manifest
from train.export import rules
from train.export.record import differences, served
from train.export.source import Source, TargetFacts

DEFAULT_NUM_LAYERS_READ = 3


def eagle3_obstacle(source: Source) -> str | None:
    """Why this drafter is no EAGLE-3 folder that engines agree on; None if it is."""
    if source.kind == "parallel":
        return (
            "it describes heads that draft token by token, or blocks whose rows see the rows behind "
            "them; a parallel drafter drafts a block whose rows look back only"
        )
    if source.kind != "eagle3":
        return f"{source.kind} drafters read token ids, this format describes heads on features"
    config, target = source.files.config, source.target
    if config.get("num_hidden_layers", 1) != 1:
        return (
            f"it has {config['num_hidden_layers']} layers; from the second on vLLM fuses with "
            "input_layernorm and SGLang with hidden_norm, so no folder means the same to both"
        )
    if config["target_hidden_size"] != target.config.hidden_size:
        return (
            f"it reads states of size {config['target_hidden_size']}, the target's have "
            f"{target.config.hidden_size}"
        )
    if problems := layer_id_problems(layer_ids(config, target), target):
        return problems[0]
    return None


def layer_ids(config: dict[str, Any], target: TargetFacts) -> list[int]:
    """The layers read, residual after k layers; those of the engines where none are named."""
    return list(config.get(LAYER_IDS) or target.default_layer_ids)


def layer_id_problems(ids: list[int], target: TargetFacts) -> list[str]:
    """Ids ascend and end before the last layer, whose state engines hand over without its norm."""
    if ids == sorted(set(ids)) and all(0 <= k < target.num_layers for k in ids):
        return []
    return [
        f"it reads layers {ids}: expected ascending numbers from 0 to {target.num_layers - 1}, "
        "since engines sort them and give the last state without the norm that training saw"
    ]


def eagle3_config(source: Source, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of vLLM's native folder, every flag written out."""
    config = {**source.files.config, **{k: source.files.config[k] for k in EAGLE3_FLAGS}}
    ids = layer_ids(config, source.target)
    config.pop("torch_dtype", None)
    return {
        **config,
        "vocab_size": source.target.vocab_size,
        "draft_vocab_size": len(source.files.tensors["lm_head.weight"]),
        "num_aux_hidden_states": len(ids),
        LAYER_IDS: ids,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }


def eagle3_tensors(source: Source, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights in `dtype`, with `d2t` and `t2d` where the draft vocabulary is a part."""
    tensors = {name: tensor.to(dtype) for name, tensor in source.files.tensors.items()}
    rows, size = len(tensors["lm_head.weight"]), source.target.vocab_size
    token_ids = source.files.token_ids
    if token_ids is None and rows != size:
        token_ids = torch.arange(rows)
    if token_ids is not None:
        t2d = torch.zeros(size, dtype=torch.bool)
        t2d[token_ids] = True
        tensors |= {"d2t": token_ids - torch.arange(rows), "t2d": t2d}
    return tensors


def weights_dtype(source: Source, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype to write: as asked for, else as stored."""
    return dtype or source.files.tensors["lm_head.weight"].dtype


def write_eagle3(
    source: Source,
    folder: Path,
    *,
    engine: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
) -> None:
    """config.json, weights, the target's tokenizer and the record."""
    rules.write_json(folder / "config.json", config)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / rules.WEIGHTS,
        metadata={"format": "pt"},
    )
    source.target.tokenizer.save_pretrained(folder)
    write_manifest(folder, served(source, engine, one_form(config, source.target)))


def one_form(config: dict[str, Any], target: TargetFacts) -> dict[str, Any]:
    """What the configuration means, whatever its form and whatever it leaves out."""
    found = native_config(config)
    return {**found, LAYER_IDS: layer_ids(found, target)}


def check_eagle3(folder: Path, target: TargetFacts, *, prefix: str) -> list[str]:
    """The rules that all EAGLE-3 folders share.

    Args:
        prefix: of the layer's tensors: "midlayer." or "layers.0.".
    """
    raw = read_config(folder)
    config = one_form(raw, target)
    stored = rules.stored_tensors(folder)
    problems = [*rules.no_pickles(folder), *layer_id_problems(config[LAYER_IDS], target)]
    if config["target_hidden_size"] != target.config.hidden_size:
        problems.append(
            f"target_hidden_size is {config['target_hidden_size']}, the target's "
            f"{target.config.hidden_size}"
        )
    if config.get("tie_word_embeddings", False):
        problems.append("tie_word_embeddings is true: a head over the draft vocabulary is its own")
    weights = {k: v for k, v in stored.items() if k not in ("d2t", "t2d")}
    return [
        *problems,
        *rules.same_vocab_size(config, target, "an EAGLE-3 folder"),
        *rules.same_tensors(weights, _wanted_tensors(config, weights, prefix)),
        *rules.dtype_as_said(weights, raw),
        *rules.rope_is_complete(raw.get("transformer_layer_config", raw)),
        *vocabulary_problems(folder, stored, config, target),
        *rules.finite(folder),
        *rules.same_tokenizer(folder, target),
        *rules.recorded_target(folder, target),
        *differences(folder, config),
    ]


def vocabulary_problems(
    folder: Path,
    stored: dict[str, tuple[str, list[int]]],
    config: dict[str, Any],
    target: TargetFacts,
) -> list[str]:
    """A reduced vocabulary has its map beside it, as offsets and as a mask."""
    size, draft_size = target.vocab_size, config["draft_vocab_size"]
    if "d2t" not in stored:
        if draft_size == size:
            return []
        return [f"d2t is missing: {draft_size} draft ids would be read as target ids"]
    expected = {"d2t": ("I64", [draft_size]), "t2d": ("BOOL", [size])}
    wrong = [
        f"{name} is {stored.get(name, ('missing',))}, expected {entry}"
        for name, entry in expected.items()
        if stored.get(name) != entry
    ]
    if wrong:
        return wrong
    tensors = {name: rules.stored_tensor(folder, name) for name in expected}
    problem = draft_vocab_problem(tensors["d2t"], tensors["t2d"])
    return [problem] if problem else []


def _wanted_tensors(
    config: dict[str, Any], stored: dict[str, Any], prefix: str
) -> dict[str, list[int]]:
    """{name: shape} as the configuration says. The embeddings may be left to the target."""
    size, inner = config["hidden_size"], config["intermediate_size"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or size // heads
    num_read = len(config[LAYER_IDS])
    states = num_read * config["target_hidden_size"]
    layer = {
        "self_attn.q_proj": [heads * head_dim, 2 * size],
        "self_attn.k_proj": [groups * head_dim, 2 * size],
        "self_attn.v_proj": [groups * head_dim, 2 * size],
        "self_attn.o_proj": [size, heads * head_dim],
        "mlp.gate_proj": [inner, size],
        "mlp.up_proj": [inner, size],
        "mlp.down_proj": [size, inner],
        "hidden_norm": [size],
        "input_layernorm": [size],
        "post_attention_layernorm": [size],
    }
    wanted = {f"{prefix}{name}.weight": shape for name, shape in layer.items()}
    wanted |= {"fc.weight": [size, states], "norm.weight": [size]}
    wanted["lm_head.weight"] = [config["draft_vocab_size"], size]
    if "embed_tokens.weight" in stored:
        wanted["embed_tokens.weight"] = [config["vocab_size"], size]
    if config["fc_norm"]:
        wanted |= {f"fc_norm.{i}.weight": [config["target_hidden_size"]] for i in range(num_read)}
    if config["norm_before_fc"]:
        wanted["input_norm.weight"] = [states]
    return wanted
