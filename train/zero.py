"""DeepSpeed ZeRO, through accelerate's plugin: its engine reduces, clips, updates and holds the shares.

Stages 1 to 3, without offloading. What the engine holds is flat partitions; DeepSpeed's own access to
whole tensors by parameter (`safe_get_full_*`, `safe_set_full_*`) is the way in and out, so checkpoints
are those of every other way of training. Weights stay float32; autocast is ours, inside the loss.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType
from torch import Tensor, nn
from torch.optim import AdamW
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from train.optim import OptimConfig, set_learning_rate
from train.precision import Precision
from train.sharding import trained_weights

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW


def start_zero(accelerator: Accelerator) -> None:
    """Makes accelerate honour its DeepSpeed settings on CPUs too, and transformers load models whole.

    Without it `from_pretrained` would cut the target into shares at stage 3.
    """
    wanted = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if wanted and accelerator.distributed_type is DistributedType.MULTI_CPU:
        plugin = DeepSpeedPlugin()
        plugin.select(_from_accelerator_state=True)
        accelerator.state.deepspeed_plugins = plugin
        accelerator.state.distributed_type = DistributedType.DEEPSPEED
        PartialState().distributed_type = DistributedType.DEEPSPEED  # which the other copies from
    if is_zero(accelerator):
        unset_hf_deepspeed_config()


def is_zero(accelerator: Accelerator) -> bool:
    """Whether accelerate was told to use DeepSpeed."""
    return accelerator.distributed_type is DistributedType.DEEPSPEED


def check_zero(settings: dict[str, Any], precision: Precision) -> None:
    """Refuse what was never run.

    Raises:
        ValueError: naming the setting.
    """
    zero = settings["zero_optimization"]
    if zero["stage"] not in (1, 2, 3):
        raise ValueError(
            f"accelerate's zero_stage is {zero['stage']}, expected 1, 2 or 3: for whole copies take "
            "conf/accelerate/8gpu.yaml"
        )
    for what in ("offload_optimizer", "offload_param"):
        if (place := zero.get(what, {}).get("device", "none")) != "none":
            raise ValueError(
                f"accelerate's {what}_device is {place}, expected none: offloading has another "
                "optimizer, whose state a checkpoint could not hold"
            )
    if precision is Precision.fp16:
        raise ValueError(
            "training.precision=fp16 does not go with DeepSpeed, which scales losses by itself: set "
            "training.precision=bf16 or fp32"
        )


class ZeroUpdates:
    """By DeepSpeed's engine.

    Args:
        drafter: what is trained; DeepSpeed cuts its parameters into shares in place at stage 3.
        loss: the drafter with its objective.

    Attributes:
        loss: the engine, which is called in place of `loss`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        drafter: nn.Module,
        loss: nn.Module,
        optimizer: AdamW,
        config: OptimConfig,
    ) -> None:
        self._drafter, self._adamw, self._device = drafter, optimizer, accelerator.device
        self._rank, self._num_processes = accelerator.process_index, accelerator.num_processes
        # Behind `prepare` the optimizer's own parameters are flat partitions.
        self._sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._parameters = [one for group in optimizer.param_groups for one in group["params"]]
        settings = accelerator.deepspeed_plugin.deepspeed_config
        # Batches are ours, and so is accumulation.
        settings |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
        settings["gradient_clipping"] = config.max_grad_norm
        self.loss, _ = accelerator.prepare(loss, optimizer)
        self._zero = self.loss.optimizer

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[object]:
        self.loss.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.loss.backward(loss)

    def step(self, learning_rate: float) -> Tensor:
        set_learning_rate(self._adamw, learning_rate)
        self.loss.step()
        # A number of the host where the gradient was not finite.
        norm = torch.as_tensor(self.loss.get_global_grad_norm(), dtype=torch.float32)
        return norm.to(self._device)

    def param_groups(self) -> list[dict[str, Any]]:
        groups, first = [], 0
        for group, size in zip(self._adamw.param_groups, self._sizes, strict=True):
            numbers = list(range(first, first + size))
            groups.append({k: v for k, v in group.items() if k != "params"} | {"params": numbers})
            first += size
        return groups

    def moments(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        if not self._adamw.state:
            return {}
        self._link()
        step = next(iter(self._adamw.state.values()))["step"]  # the same for all
        tensors = {}
        for number, parameter in enumerate(self._parameters):
            tensors[f"optimizer.{number}.step"] = step.clone()
            for name in MOMENTS:
                whole = safe_get_full_optimizer_state(parameter, name)
                tensors[f"optimizer.{number}.{name}"] = whole.clone()
        return tensors

    def load_moments(self, tensors: dict[str, Tensor], param_groups: list[dict[str, Any]]) -> None:
        self.forget_moments()
        for group, saved in zip(self._adamw.param_groups, param_groups, strict=True):
            group |= {k: v for k, v in saved.items() if k != "params"}
            group["betas"] = tuple(group["betas"])  # JSON has lists
        if not any(name.startswith("optimizer.") for name in tensors):
            return
        for flat in self._partitions():
            step = tensors["optimizer.0.step"].to(flat.device)
            empty = {name: torch.zeros_like(flat.detach()) for name in MOMENTS}
            self._adamw.state[flat] = {"step": step.clone(), **empty}
        self._link()
        for number, parameter in enumerate(self._parameters):
            for name in MOMENTS:
                self._put_moment(parameter, tensors[f"optimizer.{number}.{name}"], name)

    def forget_moments(self) -> None:
        self._adamw.state.clear()

    def whole_weights(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        whole = trained_weights(self._drafter)
        for name, parameter in self._trainable():
            whole[name] = safe_get_full_fp32_param(parameter)
        return whole

    @torch.no_grad()
    def put_weights(self, whole: dict[str, Tensor]) -> None:
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        trainable = self._trainable()
        # What the forward pass reads: whole inside this block at stage 3, in place before.
        with GatheredParameters([parameter for _, parameter in trainable], modifier_rank=0):
            for name, own in trained_weights(self._drafter).items():
                own.copy_(whole[name])
        for name, parameter in trainable:  # what the optimizer updates
            if self._zero_stage == 3:
                safe_set_local_fp32_param(parameter, self._own_part(parameter, whole[name]))
            else:
                safe_set_full_fp32_param(parameter, whole[name].to(self._device))

    def _put_moment(self, parameter: nn.Parameter, whole: Tensor, name: str) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if self._zero_stage == 3:
            part = self._own_part(parameter, whole)
            safe_set_local_optimizer_state(parameter, part, name)
        else:
            safe_set_full_optimizer_state(parameter, whole.to(self._device), name)

    def _own_part(self, parameter: Any, whole: Tensor) -> Tensor:
        """This process's share at stage 3, with the padding that DeepSpeed's own cut forgets."""
        size = parameter.partition_numel()
        padded = whole.new_zeros(size * self._num_processes)
        padded[: whole.numel()] = whole.flatten()
        return padded[size * self._rank : size * (self._rank + 1)].to(self._device)

    def _trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(k, v) for k, v in self._drafter.named_parameters() if v.requires_grad]

    def _partitions(self) -> list[Tensor]:
        """This process's part of each group."""
        if self._zero_stage == 3:
            return self._zero.fp32_partitioned_groups_flat
        return self._zero.single_partition_of_fp32_groups

    @property
    def _zero_stage(self) -> int:
        return self.loss.zero_optimization_stage()

    def _link(self) -> None:
        """Lets DeepSpeed find each parameter's moments: stages 1 and 2 do it behind the first step of the
        first group alone."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        if self._zero_stage < 3:
            state = self._adamw.state
            for flat, group in zip(self._partitions(), self._zero.bit16_groups, strict=True):
                lazy_init_hp_params_optimizer_state(group, flat, state)
