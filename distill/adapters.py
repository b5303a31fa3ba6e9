"""LoRA adapters on a drafter: trained in place of its weights, merged before anything decodes.

A drafter decodes with plain matrices, so adapters exist during training only. The merge is computed
in float32 and cast once; what it changes is measured and kept with the folder.
"""

import copy
from dataclasses import dataclass

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import PreTrainedModel

from specdec_runtime.drafters.causal_lm import CausalLMDrafter

# Tokens that the merge is checked on: enough for every matrix to be used on varied states.
_PROBE_ROWS, _PROBE_TOKENS = 4, 32


@dataclass(kw_only=True)
class LoraSettings:
    """draft.lora.*

    rank: of the update of each matrix; 0 = no adapters, the layers themselves are trained.
    alpha: the update is scaled by alpha / rank.
    dropout: in front of the adapters.
    """

    rank: int = 0
    alpha: float = 32.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"draft.lora.rank must be 0 or more, got {self.rank}")
        if not self.alpha > 0:
            raise ValueError(f"draft.lora.alpha must be positive, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"draft.lora.dropout must be in [0, 1), got {self.dropout}")


def add_lora(module: PreTrainedModel, settings: LoraSettings) -> None:
    """Puts adapters on all linear layers but the head; they alone are trained. They start as zero."""
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules="all-linear",
    )
    inject_adapter_in_model(config, module)


def merged(module: PreTrainedModel) -> PreTrainedModel:
    """A copy with the adapters added to the weights, and no adapter left."""
    copied = copy.deepcopy(module)
    for name, layer in list(copied.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge(safe_merge=True)  # type: ignore[operator]
            owner, _, leaf = name.rpartition(".")
            setattr(copied.get_submodule(owner), leaf, layer.get_base_layer())
    copied._hf_peft_config_loaded = False
    return copied.requires_grad_(False)


@torch.no_grad()
def merge_report(module: PreTrainedModel, written: PreTrainedModel) -> dict[str, float]:
    """What merging and casting changed, on random tokens.

    Args:
        module: with its adapters, float32.
        written: the merged copy, in the dtype that it is saved in.

    Returns:
        Largest differences of a logit, in front of and behind the cast, and the share of positions
        where the first choice stayed the same.
    """
    was_training = module.training
    module.eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(module.config.vocab_size, (_PROBE_ROWS, _PROBE_TOKENS), generator=generator)
    ids = ids.to(module.device)
    adapted = _logits(module, ids)
    plain = _logits(merged(module), ids)
    cast = _logits(copy.deepcopy(written).float(), ids)
    module.train(was_training)
    return {
        "merge_largest_logit_difference": float((plain - adapted).abs().max()),
        "written_largest_logit_difference": float((cast - adapted).abs().max()),
        "written_greedy_agreement": float((cast.argmax(-1) == adapted.argmax(-1)).float().mean()),
    }


def _logits(module: PreTrainedModel, ids: Tensor) -> Tensor:
    return module(input_ids=ids, use_cache=False).logits.float()


class MergedDrafter(CausalLMDrafter):
    """Drafts with the merged weights of a module that has adapters."""

    adapted: PreTrainedModel

    def refresh(self) -> None:
        self.module = merged(self.adapted)
        super().refresh()
