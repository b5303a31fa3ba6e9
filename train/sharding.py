"""Weights in shares (FSDP2): whether they are, and the way between a shard and the whole tensor.

Checkpoints hold whole tensors, so that a drafter loads anywhere and one written with FSDP2 resumes
without it.
"""

import os

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def is_fsdp(accelerator: Accelerator) -> bool:
    """Whether accelerate was told to shard with FSDP.

    Raises:
        ValueError: for FSDP1, whose flattened parameters have other names and shapes.
    """
    if accelerator.distributed_type is not DistributedType.FSDP:
        return False
    if not accelerator.is_fsdp2:
        raise ValueError("accelerate is set to FSDP version 1: set fsdp_version: 2 in its config")
    return True


def shard_on_cpu(accelerator: Accelerator) -> None:
    """Makes accelerate honour its own FSDP settings on CPUs too, where it leaves them out."""
    wanted = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if wanted and accelerator.distributed_type is DistributedType.MULTI_CPU:
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState().distributed_type = DistributedType.FSDP  # which the other copies from


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every process; every process has to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(whole: Tensor, model: Tensor) -> Tensor:
    """`whole`, which every process holds, on the device of `model` and sharded as it is."""
    moved = whole.to(model.device)
    if not isinstance(model, DTensor):
        return moved
    return distribute_tensor(moved, model.device_mesh, model.placements, src_data_rank=None)


def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters and saved buffers by plain name; a tied parameter appears once. Sharded
    where the module is."""
    trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    state = module.state_dict()
    return {k: v.detach() for k, v in state.items() if k in trainable or k not in parameters}


def full_optimizer_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Moments and step counts of every parameter as `optimizer.<parameter number>.<name>`."""
    tensors = {}
    for number, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            assert isinstance(value, Tensor), f"optimizer state {name} is no tensor"
            tensors[f"optimizer.{number}.{name}"] = full_tensor(value).contiguous()
    return tensors


def load_optimizer_state(
    optimizer: Optimizer, tensors: dict[str, Tensor], param_groups: list[dict]
) -> None:
    """The inverse: loads moments in place, sharded as their parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith("optimizer."):
            _, number, name = key.split(".", 2)
            of = parameters[int(number)]
            is_moment = tensor.shape == of.shape and name != "step"
            state.setdefault(int(number), {})[name] = like(tensor, of) if is_moment else tensor
    groups = [group | {"betas": tuple(group["betas"])} for group in param_groups]  # JSON has lists
    with torch.no_grad():
        optimizer.load_state_dict({"state": state, "param_groups": groups})
