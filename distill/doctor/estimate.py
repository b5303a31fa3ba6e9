"""Steps and time of what is ahead, from the sizes of the models and one measured rate.

Counted are the multiplications of the large matrices; what else is done comes out as an efficiency
that was measured on the default job (docs/data.md). Elsewhere right within a factor of two or
three, which is what one needs to know before starting.
"""

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specdec_runtime.machine import matmul_flops_per_s
from specdec_runtime.model_names import resolve_model

# Measured: shares of the matrix rate that writing answers in batches and training steps reach.
_WRITING, _TRAINING = 0.5, 0.35
# Forward and backward of what is trained; of a frozen head forward and the gradient of its input.
_TRAINED_FLOPS, _HEAD_FLOPS, _FORWARD_FLOPS = 6, 4, 2


@dataclass(frozen=True)
class Sizes:
    """Parameters of a target.

    body: of its layers. num_layers: how many there are. head: rows * width.
    """

    body: int
    num_layers: int
    hidden_size: int
    head: int


@dataclass(frozen=True)
class Estimate:
    """Seconds on this machine."""

    flops_per_s: float
    answers_s: float
    epoch_s: float

    def lines(self, tokens_to_write: int, steps: int) -> list[tuple[str, str]]:
        """Name and value of each thing to come, for people."""
        rate = f"at {self.flops_per_s / 1e9:.0f} GFLOP/s, within a factor of three"
        found = []
        if tokens_to_write:
            what = f"at most {tokens_to_write:,} tokens, about {duration(self.answers_s)}"
            found.append(("answers to write", what))
        number = f"{steps:,} steps (micro-batches), " if steps else ""
        found.append(("an epoch of training", f"{number}about {duration(self.epoch_s)}"))
        return [*found, ("estimated", rate)]


def sizes_of(model: str) -> Sizes:
    """Counted on a model without memory.

    Raises:
        ValueError: if there is no such model.
    """
    config = AutoConfig.from_pretrained(resolve_model(model)).get_text_config(decoder=True)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    head = module.get_output_embeddings().weight.numel()
    tied = module.get_output_embeddings().weight is module.get_input_embeddings().weight
    total = sum(parameter.numel() for parameter in module.parameters())
    body = total - head * (1 if tied else 2)
    return Sizes(body, config.num_hidden_layers, config.hidden_size, head)


def estimate(
    sizes: Sizes,
    *,
    prompt_tokens: int,
    tokens_to_write: int,
    row_tokens: int,
    trained_tokens: int,
    draft_layers: int,
    draft_vocab_size: int | None,
    device: torch.device,
) -> Estimate:
    """Time to write the answers that are missing, and of an epoch of training on all of them.

    Args:
        prompt_tokens: that the target has to read for its answers. tokens_to_write: of these.
        row_tokens: of an epoch, prompts included. trained_tokens: those of them that carry loss.
    """
    rate = matmul_flops_per_s(torch.float32, device, seconds=0.3)
    passed = sizes.body * (prompt_tokens + tokens_to_write) + sizes.head * tokens_to_write
    draft_body = sizes.body // sizes.num_layers * draft_layers
    draft_head = sizes.head if draft_vocab_size is None else draft_vocab_size * sizes.hidden_size
    trained = _TRAINED_FLOPS * draft_body * row_tokens
    # Of both heads, the draft's and the target's.
    heads = (_HEAD_FLOPS + _FORWARD_FLOPS) * draft_head * trained_tokens
    answers_s = _FORWARD_FLOPS * passed / (rate * _WRITING)
    return Estimate(rate, answers_s, (trained + heads) / (rate * _TRAINING))


def duration(seconds: float) -> str:
    """Readable: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
