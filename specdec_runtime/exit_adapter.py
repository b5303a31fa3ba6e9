"""What stands between the target's early residual and its frozen head: a norm and a small network.

    out = A norm(residual) + MLP(norm(residual))

A starts as the least-squares map to the target's final state (distill/lens.py), the MLP as zero, so
that the drafter is useful before its first step. Kangaroo (arXiv:2404.18911) has an attention layer
in this place; without one the adapter needs no cache and costs less than a layer.

Shapes: D hidden size, F size of the MLP.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specdec_runtime.model import CausalModel
from specdec_runtime.native import NativeLinear, NativeModel

ADAPTER_NAME = "exit_adapter.safetensors"
_EYE_ROWS = 64  # unit vectors whose logits are held at once


class ExitAdapter(nn.Module):
    """[..., D] residual after the first layers -> [..., D] what the target's head reads.

    Args:
        mlp_size: F; 0 = the linear map alone.
        norm_eps: of the norm, the target's own.
    """

    def __init__(self, hidden_size: int, *, mlp_size: int, norm_eps: float) -> None:
        super().__init__()
        self.norm_eps = norm_eps
        self.norm = nn.Parameter(torch.ones(hidden_size))
        self.lens = nn.Linear(hidden_size, hidden_size, bias=False)
        nn.init.eye_(self.lens.weight)
        self.gate_up = nn.Linear(hidden_size, 2 * mlp_size, bias=False) if mlp_size else None
        self.down = nn.Linear(mlp_size, hidden_size, bias=False) if mlp_size else None
        if self.down is not None:
            nn.init.zeros_(self.down.weight)

    def normed(self, residual: Tensor) -> Tensor:
        """[..., D] what the lens and the MLP read."""
        return F.rms_norm(residual, self.norm.shape, self.norm, self.norm_eps)

    def forward(self, residual: Tensor) -> Tensor:
        x = self.normed(residual)
        out = self.lens(x)
        if self.gate_up is None or self.down is None:
            return out
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return out + self.down(F.silu(gate) * up)

    def save_pretrained(self, folder: Path) -> None:
        """Writes the weights as they are; the sizes are in the folder's manifest."""
        save_file(
            {name: tensor.contiguous() for name, tensor in self.state_dict().items()},
            folder / ADAPTER_NAME,
        )


def load_exit_adapter(
    folder: str | Path, hidden_size: int, *, mlp_size: int, norm_eps: float, device: torch.device
) -> ExitAdapter:
    """The adapter in a drafter folder, ready to draft.

    Raises:
        ValueError: if the file is missing, or holds weights of other sizes.
    """
    path = Path(folder) / ADAPTER_NAME
    if not path.is_file():
        raise ValueError(f"{folder} has no {ADAPTER_NAME}: expected a trained early_exit drafter")
    adapter = ExitAdapter(hidden_size, mlp_size=mlp_size, norm_eps=norm_eps)
    try:
        adapter.load_state_dict(load_file(path), strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path} does not fit this target and the sizes in its manifest: {reason}"
        ) from None
    return adapter.to(device).requires_grad_(False).eval()


class ReducedHead:
    """Some rows of a model's frozen head: [..., D] post-norm states -> [..., n] float32 logits.

    Args:
        token_ids: [n] int64, which rows.
    """

    def __init__(self, model: CausalModel, token_ids: Tensor) -> None:
        weight = _head_weight(model, token_ids)  # [n, D]
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight.to(model.device, model.dtype), requires_grad=False)
        self._dtype = model.dtype
        self._product = NativeLinear(linear) if isinstance(model, NativeModel) else linear

    @torch.no_grad()
    def __call__(self, hidden: Tensor) -> Tensor:
        if isinstance(self._product, NativeLinear):
            return self._product(hidden)
        return self._product(hidden.to(self._dtype)).float()


def _head_weight(model: CausalModel, token_ids: Tensor) -> Tensor:
    """[n, D] rows of the head, whatever engine holds them: the logits of the unit vectors."""
    size = model.hidden_size
    rows = torch.empty(len(token_ids), size)
    ids = token_ids.to(model.device)
    for start in range(0, size, _EYE_ROWS):
        end = min(start + _EYE_ROWS, size)
        unit = torch.zeros(end - start, size, device=model.device)
        unit[:, start:end].fill_diagonal_(1.0)
        rows[:, start:end] = model.logits_of(unit)[:, ids].T.cpu()
    return rows
