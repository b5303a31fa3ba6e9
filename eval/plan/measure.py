"""The costs of an untrained drafter of a candidate's shape, in real rounds of the real decoder."""

import copy
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from eval.costs import measure_costs
from eval.plan.outlook import Plan, plan_of
from eval.progress import Stage, terminal_stage
from specdec_runtime.auto_length import time_passes
from specdec_runtime.formats import (
    DRAFT_VOCAB_NAME,
    DrafterManifest,
    TargetRecord,
    write_drafter,
)
from specdec_runtime.int8_grid import round_matrices
from specdec_runtime.loading import load_drafter, load_target
from specdec_runtime.tokenizers import tokenizer_hash

CONTEXT = "Explain in a few sentences what a plan is good for, and where it is not. "


@dataclass(kw_only=True)
class PlanConfig:
    """`python -m eval.plan`.

    target: hub id, folder, GGUF file or the name of the embedded default.
    layers: of the candidate, each of the target's own shape.
    draft_vocab_size: tokens that it can propose; null = all of the target's.
    max_draft_tokens: longest draft that is looked at.
    context_tokens: length of the text that costs are measured behind.
    training_minutes: what writing the text and training would take, for the payback.
    """

    target: str = "smollm2-135m-instruct"
    layers: list[int] = field(default_factory=lambda: [1, 2, 4])
    draft_vocab_size: int | None = 8192
    max_draft_tokens: int = 8
    context_tokens: int = 128
    training_minutes: float = 20.0
    dtype: str = "auto"
    device: str = "auto"
    engine: str = "auto"

    def __post_init__(self) -> None:
        if not self.layers or min(self.layers) < 1:
            raise ValueError(f"layers must be a list of counts from 1, got {list(self.layers)}")
        for name in ("max_draft_tokens", "context_tokens", "training_minutes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ValueError(
                f"draft_vocab_size must be at least 1 or null, got {self.draft_vocab_size}"
            )


def measure_plans(config: PlanConfig, *, stage: Stage = terminal_stage) -> list[Plan]:
    """Measures every candidate on the target.

    Raises:
        ValueError: a target that can not be loaded, or a context that it has no room for.
    """
    transformers_logging.disable_progress_bar()
    target = load_target(
        config.target, dtype=config.dtype, device=config.device, engine=config.engine
    )
    text_ids = list(target.tokenizer(CONTEXT)["input_ids"])
    prompt = (text_ids * (config.context_tokens // len(text_ids) + 1))[: config.context_tokens]
    pass_s = time_passes(target.model, prompt, max_draft_tokens=config.max_draft_tokens)
    plans = []
    for num_layers in config.layers:
        with (
            tempfile.TemporaryDirectory(prefix="draftloop-plan-") as folder,
            stage(f"costs of {num_layers} layers", 1) as advance,
        ):
            drafter = _untrained(target, num_layers, config, Path(folder) / "drafter")
            found = measure_costs(
                target,
                {f"{num_layers} layers": drafter},
                [prompt],
                max_draft_tokens=config.max_draft_tokens,
                pass_s=pass_s,
            )[0]
            advance(1)
        plans.append(plan_of(num_layers, found.costs, training_minutes=config.training_minutes))
    return plans


def _untrained(target: Any, num_layers: int, config: PlanConfig, folder: Path) -> Any:
    """A drafter of the candidate's shape with random weights, loaded as a trained one would be."""
    shape = copy.deepcopy(target.model.config)
    shape.num_hidden_layers = num_layers
    if getattr(shape, "layer_types", None):
        shape.layer_types = shape.layer_types[:num_layers]
    module = AutoModelForCausalLM.from_config(shape, dtype=target.model.dtype)
    if module.dtype == torch.bfloat16:
        round_matrices(module)
    size = min(config.draft_vocab_size or target.real_vocab_size, target.real_vocab_size)
    tensors = {}
    if size < target.real_vocab_size:
        kept = torch.arange(target.model.vocab_size) < size
        tensors = {DRAFT_VOCAB_NAME: {"d2t": torch.zeros(size, dtype=torch.int64), "t2d": kept}}
    record = TargetRecord(
        name=target.name,
        fingerprint=target.fingerprint,
        vocab_size=target.model.vocab_size,
        real_vocab_size=target.real_vocab_size,
    )
    manifest = DrafterManifest(
        kind="causal_lm", target=record, tokenizer_hash=tokenizer_hash(target.tokenizer)
    )
    write_drafter(folder, module, manifest, tokenizer=target.tokenizer, tensors=tensors)
    return load_drafter(str(folder), target, engine=config.engine)
