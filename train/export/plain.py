"""A whole language model as the drafter: the folder that transformers, vLLM and SGLang all read.

Its vocabulary is the target's, row by row; ids mean what they mean to the target. See full_vocab.py
for what becomes of a reduced one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from specdec_runtime.drafter_files import read_config
from specdec_runtime.formats import write_manifest
from train.export import rules
from train.export.full_vocab import fill_vocabulary
from train.export.record import differences, served
from train.export.source import Source, TargetFacts

# Settings with which a model would change its own next-token distribution before it is compared.
WARPERS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "typical_p", "do_sample")


def plain_obstacle(source: Source) -> str | None:
    """Why this drafter cannot be a plain draft model; None if it can."""
    if source.kind == "causal_lm":
        return None
    if source.kind == "cross_tokenizer":
        return (
            "its token ids are not the target's, as those of a plain draft model have to be; its own "
            "folder is a causal LM with its tokenizer, which transformers' generate takes as "
            "assistant_model and assistant_tokenizer"
        )
    return (
        f"{source.kind} drafters read the target's hidden states, a plain draft model gets token "
        "ids only"
    )


def plain_module(source: Source, dtype: torch.dtype | None) -> PreTrainedModel:
    """The drafter's model with the target's vocabulary."""
    module = source.module(dtype)
    fill_vocabulary(
        module,
        token_ids=source.files.token_ids,
        size=source.target.vocab_size,
        text_ids=source.sample_ids,
    )
    return module


def write_plain(source: Source, folder: Path, *, dtype: torch.dtype | None, engine: str) -> None:
    """Weights, tokenizer, generation settings and record of a plain draft model."""
    module = plain_module(source, dtype)
    module.config.architectures = [type(module).__name__]
    module.config.dtype = module.dtype
    module.generation_config = draft_generation_config(source)
    module.save_pretrained(folder)
    source.target.tokenizer.save_pretrained(folder)
    write_manifest(folder, served(source, engine, read_config(folder)))


def draft_generation_config(source: Source) -> GenerationConfig:
    """As measured: a fixed number of draft tokens, no stopping by confidence, nothing that warps.

    A drafter's own repetition penalty made a model refuse its own tokens.
    """
    tokenizer, eos = source.target.tokenizer, source.target.eos_token_ids
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=list(eos) if len(eos) > 1 else next(iter(eos), None),
        pad_token_id=tokenizer.pad_token_id,
        num_assistant_tokens=source.num_draft_tokens,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )


def check_plain(folder: Path, target: TargetFacts, engine: str) -> list[str]:
    """What an engine that reads a plain draft model would stumble over; empty if nothing."""
    config = read_config(folder)
    stored = rules.stored_tensors(folder)
    return [
        *rules.no_pickles(folder),
        *_is_causal_lm(config),
        *rules.same_vocab_size(config, target, engine),
        *rules.same_tensors(stored, _wanted_tensors(folder)),
        *rules.dtype_as_said(stored, config),
        *rules.rope_is_complete(config),
        *rules.finite(folder),
        *rules.same_tokenizer(folder, target),
        *_generation_settings(folder, target),
        *rules.recorded_target(folder, target),
        *differences(folder, config),
    ]


def _is_causal_lm(config: Mapping[str, Any]) -> list[str]:
    missing = [key for key in ("architectures", "model_type") if not config.get(key)]
    if missing:
        return [f"config.json lacks {', '.join(missing)}: an engine cannot tell what it is"]
    if not any(name.endswith("ForCausalLM") for name in config["architectures"]):
        return [f"architectures is {config['architectures']}, expected a causal language model"]
    return []


def _wanted_tensors(folder: Path) -> dict[str, list[int]]:
    """{name: shape} as the configuration says."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    wanted = {name: list(tensor.shape) for name, tensor in module.state_dict().items()}
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight", None)
    return wanted


def _generation_settings(folder: Path, target: TargetFacts) -> list[str]:
    if not (folder / "generation_config.json").is_file():
        return ["generation_config.json is missing: the draft length would be the engine's own"]
    found = GenerationConfig.from_pretrained(folder)
    problems = [
        f"generation_config.json sets {name}: a drafter with a warper of its own is refused more"
        for name in WARPERS
        if found.to_diff_dict().get(name) is not None
    ]
    if found.num_assistant_tokens_schedule != "constant" or not found.num_assistant_tokens:
        problems.append(
            "generation_config.json: expected num_assistant_tokens with a constant schedule, else "
            "the draft length drifts away from the one that was measured"
        )
    if found.assistant_confidence_threshold != 0:
        problems.append(
            f"generation_config.json: assistant_confidence_threshold is "
            f"{found.assistant_confidence_threshold}, expected 0: drafts would end before the length "
            "that was measured"
        )
    eos = found.eos_token_id if isinstance(found.eos_token_id, list) else [found.eos_token_id]
    if set(target.eos_token_ids) != {token_id for token_id in eos if token_id is not None}:
        problems.append(f"eos_token_id is {eos}, the target ends at {list(target.eos_token_ids)}")
    return problems
