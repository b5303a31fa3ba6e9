"""vLLM: a plain draft model, the native folder of an EAGLE-3 head, or the DSpark one of a parallel drafter."""

import json
from pathlib import Path
from typing import Any

import torch

from specdec_runtime.drafter_files import is_eagle3, read_config
from specdec_runtime.parallel_files import is_parallel
from train.export.eagle3_folder import (
    check_eagle3,
    eagle3_config,
    eagle3_obstacle,
    eagle3_tensors,
    weights_dtype,
    write_eagle3,
)
from train.export.parallel_folder import check_parallel, parallel_obstacle, write_parallel
from train.export.plain import check_plain, plain_obstacle, write_plain
from train.export.source import Source, TargetFacts

NAME = "vllm"
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")


def obstacle(source: Source) -> str | None:
    if source.kind == "parallel":
        return parallel_obstacle(source)
    return eagle3_obstacle(source) if source.kind == "eagle3" else plain_obstacle(source)


def write(source: Source, folder: Path, *, dtype: torch.dtype | None) -> None:
    if source.kind == "parallel":
        write_parallel(source, folder, engine=NAME, dtype=dtype)
        return
    if source.kind != "eagle3":
        write_plain(source, folder, dtype=dtype, engine=NAME)
        return
    dtype = weights_dtype(source, dtype)
    config = {**eagle3_config(source, dtype), "architectures": [ARCHITECTURES[0]]}
    tensors = eagle3_tensors(source, dtype)
    write_eagle3(source, folder, engine=NAME, config=config, tensors=tensors)


def check(folder: Path, target: TargetFacts) -> list[str]:
    config = read_config(folder)
    if is_parallel(config):
        return check_parallel(folder, target)
    if not is_eagle3(config):
        return check_plain(folder, target, NAME)
    problems = check_eagle3(folder, target, prefix="midlayer.")
    if not set(config.get("architectures", ())) & set(ARCHITECTURES):
        problems.append(f"architectures is {config.get('architectures')}, expected {ARCHITECTURES}")
    return problems


def launch(folder: Path, target: TargetFacts, num_draft_tokens: int) -> str:
    settings = json.dumps(speculative_config(folder, num_draft_tokens))
    return f"vllm serve {target.name} --speculative-config '{settings}'"


def speculative_config(folder: Path, num_draft_tokens: int) -> dict[str, Any]:
    """What vLLM is told of a drafter.

    The method is said: vLLM guesses it from the path and takes anything else for a plain model.
    """
    config = read_config(folder)
    method = "eagle3" if is_eagle3(config) else "dspark" if is_parallel(config) else "draft_model"
    return {
        "method": method,
        "model": str(folder),
        "num_speculative_tokens": num_draft_tokens,
    }
