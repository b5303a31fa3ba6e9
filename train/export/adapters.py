"""Low-rank adapters are merged for serving: in float32, rounded once, with what that changed.

No engine takes an adapter as a drafter. The base model, the adapter and their sum are float32 until the
end, so in float32 the merged model is the unmerged one; in a shorter dtype the rounding is
reported as the largest logit difference and the share of positions whose top token changed.
"""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_runtime.drafter_files import ADAPTER_CONFIG
from specdec_runtime.pretrained import load_module

ADAPTER_WEIGHTS = "adapter_model.safetensors"
LARGEST_CHANGE = 0.02  # of top tokens; bfloat16 rounding of a merge stays below a few per mille


@dataclass(frozen=True)
class Merged:
    """A merged model and how its logits differ from the adapter's."""

    module: PreTrainedModel
    largest_logit_difference: float
    changed_top_tokens: float

    def describe(self) -> str:
        """One line for the terminal."""
        return (
            f"adapter merged in float32, written in {str(self.module.dtype).removeprefix('torch.')}: "
            f"largest logit difference {self.largest_logit_difference:.3g}, "
            f"{self.changed_top_tokens:.1%} of the top tokens changed"
        )


def base_model(folder: Path) -> str:
    """Hub id or folder of the model that an adapter changes.

    Raises:
        ValueError: the adapter's configuration is damaged or names none.
    """
    path = folder / ADAPTER_CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON (line {error.lineno}): {error.msg}") from None
    name = content.get("base_model_name_or_path")
    if not name:
        raise ValueError(f"{path} names no base_model_name_or_path: expected the model it changes")
    return str(name)


def merged_module(folder: Path, text_ids: Tensor, *, dtype: torch.dtype | None) -> Merged:
    """The base model of an adapter with the adapter in its weights.

    Args:
        text_ids: [1, N] a text to compare on.
        dtype: of the result; None = that of the base model.

    Raises:
        ValueError: if a weight of the adapter has no place in the model, one is missing, or the file is
            damaged.
    """
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ValueError(f"{folder} has no {ADAPTER_WEIGHTS}: pickled adapters are not read")
    base = load_module(base_model(folder), device="cpu")
    stored_dtype = base.dtype
    base.float()
    try:
        adapted = PeftModel.from_pretrained(base, folder)
    except SafetensorError as error:
        raise ValueError(
            f"{folder / ADAPTER_WEIGHTS} is damaged ({error}): copy it again"
        ) from None
    _check_keys(adapted, folder)
    with torch.inference_mode():
        before = adapted(text_ids).logits
        module = adapted.merge_and_unload()
        _untie_if_different(module)
        module.to(dtype=dtype or stored_dtype)
        module.config.dtype = dtype or stored_dtype
        after = module(text_ids).logits.float()
    merged = Merged(
        module.eval(),
        float((after - before).abs().max()),
        float((after.argmax(-1) != before.argmax(-1)).float().mean()),
    )
    if merged.changed_top_tokens > LARGEST_CHANGE:
        warnings.warn(
            f"merging {folder} changed {merged.changed_top_tokens:.1%} of the top tokens (largest "
            f"logit difference {merged.largest_logit_difference:.3g}): export in float32",
            stacklevel=2,
        )
    return merged


def _check_keys(adapted: PeftModel, folder: Path) -> None:
    path = folder / ADAPTER_WEIGHTS
    with safe_open(path, "pt") as file:
        stored = set(file.keys())
    expected = set(get_peft_model_state_dict(adapted))
    if different := sorted(stored ^ expected):
        raise ValueError(
            f"{path}: {different[0]} is {'unknown' if different[0] in stored else 'missing'}; "
            "expected exactly the weights that its configuration names"
        )


def _untie_if_different(module: PreTrainedModel) -> None:
    """A trained head beside tied embeddings: the configuration has to say that they differ now."""
    head, embeddings = module.get_output_embeddings(), module.get_input_embeddings()
    assert isinstance(head, nn.Linear)
    assert isinstance(embeddings, nn.Embedding)
    if module.config.tie_word_embeddings and not torch.equal(head.weight, embeddings.weight):
        module.config.tie_word_embeddings = False
        head.weight = nn.Parameter(head.weight.clone())
