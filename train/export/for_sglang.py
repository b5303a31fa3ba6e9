"""SGLang: STANDALONE for a plain draft model, EAGLE3 for a head."""

from pathlib import Path
from typing import Any

import torch

from specdec_runtime.drafter_files import LAYER_IDS, is_eagle3, read_config
from train.export.eagle3_folder import (
    check_eagle3,
    eagle3_config,
    eagle3_obstacle,
    eagle3_tensors,
    layer_ids,
    weights_dtype,
    write_eagle3,
)
from train.export.plain import check_plain, plain_obstacle, write_plain
from train.export.source import Source, TargetFacts

NAME = "sglang"
# Families for which SGLang counts the nested layer ids in another way than for all the rest.
OWN_COUNT = ("deepseek", "kimi", "gpt_oss")


def obstacle(source: Source) -> str | None:
    if source.kind == "parallel":
        return "SGLang's rules for block drafters were not read: serve it with vLLM"
    if source.kind != "eagle3":
        return plain_obstacle(source)
    config, target = source.files.config, source.target
    if config["norm_before_residual"]:
        return "SGLang does not implement norm_before_residual; this head was trained with it"
    if config.get("attention_bias"):
        return "SGLang's EAGLE-3 layer has no attention bias; this head was trained with one"
    ids = layer_ids(config, target)
    if len(ids) * config["target_hidden_size"] == config["hidden_size"]:
        return (
            f"it reads {len(ids)} layer of its own width, and SGLang fuses the target's states only "
            "where they are wider than the head"
        )
    if ids != target.default_layer_ids:
        if target.config.model_type.startswith(OWN_COUNT):
            return (
                f"it reads layers {ids}, and SGLang counts named layers of a "
                f"{target.config.model_type} target in its own way: train on the default layers "
                f"{target.default_layer_ids}"
            )
        if 0 in ids:
            return "it reads the embeddings (layer 0), which SGLang cannot name"
    return eagle3_obstacle(source)


def write(source: Source, folder: Path, *, dtype: torch.dtype | None) -> None:
    if source.kind != "eagle3":
        write_plain(source, folder, dtype=dtype, engine=NAME)
        return
    dtype = weights_dtype(source, dtype)
    config = sglang_config(eagle3_config(source, dtype), source.target)
    tensors = eagle3_tensors(source, dtype)
    write_eagle3(source, folder, engine=NAME, config=config, tensors=tensors)


def sglang_config(native: dict[str, Any], target: TargetFacts) -> dict[str, Any]:
    """Layer ids in SGLang's count, or left out where they are its default; rope twice.

    Older readers know `rope_theta` and `rope_scaling` only.
    """
    config = {**native, "architectures": ["LlamaForCausalLMEagle3"]}
    ids = config.pop(LAYER_IDS)
    if ids != target.default_layer_ids:
        nested = [layer_id - 1 for layer_id in ids]
        config["eagle_config"] = {"use_aux_hidden_state": True, LAYER_IDS: nested}
    rope = dict(config["rope_parameters"])
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope.get("rope_type") == "default" else rope
    return config


def check(folder: Path, target: TargetFacts) -> list[str]:
    config = read_config(folder)
    if not is_eagle3(config):
        return check_plain(folder, target, NAME)
    problems = check_eagle3(folder, target, prefix="midlayer.")
    if config.get("architectures") != ["LlamaForCausalLMEagle3"]:
        problems.append(f"architectures is {config.get('architectures')}")
    if config.get("draft_vocab_size") is None:
        problems.append("draft_vocab_size is missing: the target's head would be loaded instead")
    if config.get("norm_before_residual"):
        problems.append("norm_before_residual is true, which SGLang does not implement")
    if LAYER_IDS in config:
        problems.append(
            f"{LAYER_IDS} stands at the top, where SGLang does not look: expected eagle_config, "
            "in its own count, or nothing for the default layers"
        )
    mirrored = config.get("rope_theta")
    if mirrored != config.get("rope_parameters", {}).get("rope_theta"):
        problems.append(f"rope_theta is {mirrored}, rope_parameters says another")
    return problems


def launch(folder: Path, target: TargetFacts, num_draft_tokens: int) -> str:
    method = "EAGLE3" if is_eagle3(read_config(folder)) else "STANDALONE"
    return (
        f"python -m sglang.launch_server --model-path {target.name} "
        f"--speculative-algorithm {method} --speculative-draft-model-path {folder} "
        f"--speculative-num-steps {num_draft_tokens} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {num_draft_tokens + 1}"
    )
