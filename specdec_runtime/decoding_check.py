"""Whether a decoder, read in parts on our cache, scores a text as the model itself does.

Asked once, when a model is wrapped. What changes the head's output, looks ahead, or keeps a state
that its configuration does not name would otherwise be decoded wrongly without any error.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec_runtime.model import ModelOutput

_NUM_TOKENS = 4
# Shares of the largest logit, far above rounding and below what another model would give. In few
# bits a pass over four tokens rounds, and picks experts, otherwise than one over a single token.
_EXACT, _ROUNDED = 3e-3, 0.1


class Checked(Protocol):
    """What is asked of an `HFModel`."""

    module: Any

    @property
    def weights_device(self) -> torch.device: ...
    @property
    def device(self) -> torch.device: ...
    def new_cache(self, batch_size: int, capacity: int) -> Any: ...
    def forward(self, token_ids: Tensor, cache: Any) -> ModelOutput: ...


@torch.no_grad()
def check_decoding(model: Checked, evaluating: AbstractContextManager[Any]) -> None:
    """A text at once by the model's own code, and in two parts by ours, the second fed twice.

    Args:
        evaluating: in which the module is in eval mode.

    Raises:
        ValueError: if they do not agree.
    """
    module, name = model.module, type(model.module).__name__
    text = torch.arange(_NUM_TOKENS)[None] % module.get_input_embeddings().weight.shape[0]
    with evaluating:
        whole = module(input_ids=text.to(model.weights_device), use_cache=False).logits
    whole = whole.float().to(model.device)
    is_exact = module.dtype == torch.float32 and not getattr(module, "is_quantized", False)

    def agree(parts: Tensor | None, expected: Tensor, share: float) -> bool:
        assert parts is not None
        tolerance = share * float(whole.abs().max())
        return parts.shape == expected.shape and torch.allclose(
            parts, expected, rtol=0.0, atol=tolerance
        )

    cache = model.new_cache(1, _NUM_TOKENS)
    first = model.forward(text[:, :1], cache).logits
    if not agree(first, whole[:, :1], _EXACT if is_exact else _ROUNDED):
        raise ValueError(
            f"{name} changes its head's output, or looks ahead, in a way that this runtime does "
            "not know: decode it with transformers' own generate"
        )
    for _ in range(2):
        rest = model.forward(text[:, 1:], cache).logits
        if not agree(rest, whole[:, 1:], _EXACT if is_exact else _ROUNDED):
            raise ValueError(
                f"{name} keeps a state that this runtime cannot roll back: decode it with "
                "transformers' own generate"
            )
        cache.truncate([1])
