"""What becomes of the losses of a step: gradients, one update of the weights, and the optimizer's state.

torch's optimizer does it on one process, on whole copies (DDP) and on shares (FSDP2); under DeepSpeed
its engine does (`zero.py`). A loop and a checkpoint see only `Updates`.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import AdamW

from train.optim import set_learning_rate
from train.sharding import (
    full_optimizer_state,
    full_tensor,
    like,
    load_optimizer_state,
    trained_weights,
)


class Updates(Protocol):
    """The updates of one drafter. All processes call everything here, in the same order."""

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Around forward and backward pass of one; behind the last of a step comes `step`."""

    def backward(self, loss: Tensor) -> None:
        """Adds to the gradients, which are means over the processes."""

    def step(self, learning_rate: float) -> Tensor:
        """Clips, updates the weights and forgets the gradients; their norm [], before clipping."""

    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's settings, with its parameters by number."""

    def moments(self) -> dict[str, Tensor]:
        """Moments and step counts, whole, as `optimizer.<parameter number>.<name>`."""

    def load_moments(self, tensors: dict[str, Tensor], param_groups: list[dict[str, Any]]) -> None:
        """The inverse; other names are passed over."""

    def forget_moments(self) -> None:
        """As before the first step."""

    def whole_weights(self) -> dict[str, Tensor]:
        """What is trained, whole, by plain name."""

    def put_weights(self, whole: dict[str, Tensor]) -> None:
        """The inverse, in place."""


class TorchUpdates:
    """By torch's own optimizer.

    Args:
        loss: the drafter with its objective, wrapped for the processes there are.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        drafter: nn.Module,
        loss: nn.Module,
        optimizer: AdamW,
        scaler: GradScaler,
        *,
        max_grad_norm: float,
    ) -> None:
        self._accelerator, self._drafter, self._loss = accelerator, drafter, loss
        self.optimizer, self._scaler, self._max_grad_norm = optimizer, scaler, max_grad_norm

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext() if is_last else self._accelerator.no_sync(self._loss)

    def backward(self, loss: Tensor) -> None:
        self._scaler.scale(loss).backward()

    def step(self, learning_rate: float) -> Tensor:
        self._scaler.unscale_(self.optimizer)
        parameters = self._drafter.parameters()
        norm = self._accelerator.clip_grad_norm_(parameters, self._max_grad_norm)
        assert isinstance(norm, Tensor)
        set_learning_rate(self.optimizer, learning_rate)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return full_tensor(norm)

    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.state_dict()["param_groups"]

    def moments(self) -> dict[str, Tensor]:
        return full_optimizer_state(self.optimizer)

    def load_moments(self, tensors: dict[str, Tensor], param_groups: list[dict[str, Any]]) -> None:
        load_optimizer_state(self.optimizer, tensors, param_groups)

    def forget_moments(self) -> None:
        self.optimizer.state.clear()

    def whole_weights(self) -> dict[str, Tensor]:
        return {name: full_tensor(own) for name, own in trained_weights(self._drafter).items()}

    @torch.no_grad()
    def put_weights(self, whole: dict[str, Tensor]) -> None:
        for name, own in trained_weights(self._drafter).items():
            own.copy_(like(whole[name], own))
