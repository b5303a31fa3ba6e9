"""What a training step works on: the drafter with its objective, wrapped for the processes there are.

Many processes hold whole copies (DDP) or a share of every weight (FSDP2, DeepSpeed); which of them is
accelerate's setting. Where weights are sharded, `Parts.whole` is a copy that `gather_whole` fills
before acceptance is measured or a checkpoint is written.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.amp.grad_scaler import GradScaler
from transformers import PreTrainedModel

from distill.batches import Batch
from distill.objective import Objective, Terms
from train.optim import OptimConfig, make_optimizer
from train.precision import Precision, autocast
from train.sharding import is_fsdp, trained_weights
from train.updates import TorchUpdates, Updates
from train.zero import ZeroUpdates, is_zero

MicroBatches = Callable[[int], Batch]  # number of a micro-batch in the endless stream -> the batch


class DrafterLoss(nn.Module):
    """The drafter with its objective: what is wrapped for many processes, so that every use of a
    weight happens inside one forward call. It holds no parameter but the drafter's."""

    def __init__(self, drafter: nn.Module, objective: Objective, precision: Precision) -> None:
        super().__init__()
        self.drafter = drafter
        # FSDP2 shards by these: each decoder layer is gathered on its own.
        self._no_split_modules = getattr(drafter, "_no_split_modules", None)
        self._objective = objective
        self._precision = precision

    def forward(self, batch: Batch) -> Terms:
        device = batch.token_ids.device
        with autocast(self._precision, device):
            return self._objective(self.drafter, batch)


@dataclass(frozen=True)
class Parts:
    """What a step works on.

    Attributes:
        drafter: the bare module that is trained; its parameters may be shards.
        whole: the module that was given: the same one, or where that is sharded one with whole
            weights, as of the last `gather_whole`.
        loss: `drafter` with its objective, wrapped.
        scaler: of float16 losses; disabled at any other precision.
        host_group: for numbers that hosts agree on without waiting for a device; None = the default.
    """

    accelerator: Accelerator
    drafter: nn.Module
    whole: nn.Module
    loss: nn.Module
    updates: Updates
    scaler: GradScaler
    micro_batches: MicroBatches
    accumulation_steps: int
    host_group: dist.ProcessGroup | None

    @property
    def device(self) -> torch.device:
        return self.accelerator.device


def make_parts(
    accelerator: Accelerator,
    drafter: nn.Module,
    objective: Objective,
    micro_batches: MicroBatches,
    *,
    optim: OptimConfig,
    accumulation_steps: int,
    precision: Precision,
) -> Parts:
    """Moves the drafter to the device and wraps it for the processes there are.

    Accumulation is ours: the Accelerator's own setting must be 1,
    because its `backward` divides by it.

    Raises:
        ValueError: see `is_sharding`.
    """
    assert accelerator.gradient_accumulation_steps == 1
    drafter.to(accelerator.device)
    trained = copy.deepcopy(drafter) if is_sharding(accelerator) else drafter
    optimizer = make_optimizer(trained.parameters(), optim)
    loss = DrafterLoss(trained, objective, precision)
    scaler = GradScaler(accelerator.device.type, enabled=precision is Precision.fp16)
    updates: Updates
    if is_zero(accelerator):
        updates = zero = ZeroUpdates(accelerator, trained, loss, optimizer, optim)
        loss = zero.loss
    else:
        if is_fsdp(accelerator):
            loss, prepared = accelerator.prepare(loss, optimizer)  # swaps in the sharded parameters
            optimizer = prepared.optimizer
        else:
            loss = accelerator.prepare(loss)
        updates = TorchUpdates(
            accelerator, trained, loss, optimizer, scaler, max_grad_norm=optim.max_grad_norm
        )
    several_devices = accelerator.num_processes > 1 and accelerator.device.type != "cpu"
    return Parts(
        accelerator,
        trained,
        drafter,
        loss,
        updates,
        scaler,
        micro_batches,
        accumulation_steps,
        dist.new_group(backend="gloo") if several_devices else None,
    )


def is_sharding(accelerator: Accelerator) -> bool:
    """Whether no process holds the whole drafter while it trains.

    Raises:
        ValueError: see `is_fsdp`.
    """
    return is_zero(accelerator) or is_fsdp(accelerator)


def checkpoint_layers(module: nn.Module) -> None:
    """Gradient checkpointing of every decoder layer, in place; results stay what they are.

    Raises:
        ValueError: if the drafter has no decoder layers.
    """
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    if not models:
        raise ValueError(
            "training.gradient_checkpointing: this kind of drafter has no decoder layers to "
            "checkpoint; leave it false"
        )
    # Not reentrant: embeddings are frozen, and a reentrant one needs an input with a gradient.
    models[0].gradient_checkpointing_enable({"use_reentrant": False})


@torch.no_grad()
def gather_whole(parts: Parts) -> nn.Module:
    """`parts.whole` with the weights of now; every process has to call it."""
    if parts.whole is not parts.drafter:
        own = trained_weights(parts.whole)
        for name, tensor in parts.updates.whole_weights().items():
            own[name].copy_(tensor)
    return parts.whole


def scatter_whole(parts: Parts) -> None:
    """The inverse: gives what is trained the weights of `parts.whole`; every process has to call it."""
    if parts.whole is not parts.drafter:
        parts.updates.put_weights(trained_weights(parts.whole))


def host_sums(parts: Parts, values: list[int]) -> list[int]:
    """Sums over the processes, agreed between hosts; no device is waited for."""
    if parts.accelerator.num_processes == 1:
        return values
    own = torch.tensor(values)
    dist.all_reduce(own, group=parts.host_group)
    return own.tolist()
