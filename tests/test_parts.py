"""What a step works on: the drafter wrapped, its layers checkpointed, and what is refused."""

import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from distill.batches import BatchStream
from distill.causal_lm_modules import layers_of_target
from distill.losses import LossConfig, LossName
from distill.objectives import causal_lm
from distill.objectives.causal_lm import freeze_embeddings
from tests.conftest import tiny_llama
from tests.test_causal_lm_objective import _examples, _head
from tests.toy_training import ToyDrafter, cross_entropy, micro_batch, toy_parts
from train.optim import OptimConfig
from train.parts import DrafterLoss, checkpoint_layers, gather_whole, make_parts
from train.precision import Precision


def gradients(*, checkpointed: bool) -> list[torch.Tensor]:
    """Of a tiny Llama with dropout, whose embeddings are frozen."""
    module = tiny_llama(0)
    module.config.attention_dropout = 0.5
    for layer in module.model.layers:
        layer.self_attn.attention_dropout = 0.5
    module.get_input_embeddings().requires_grad_(False)
    if checkpointed:
        checkpoint_layers(module)
    module.train()
    torch.manual_seed(0)
    ids = torch.arange(24).view(2, 12)
    module(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum().backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def test_checkpointed_layers_give_the_same_gradients_dropout_included():
    plain, checkpointed = gradients(checkpointed=False), gradients(checkpointed=True)
    assert len(plain) == len(checkpointed) > 10
    assert all(torch.equal(*pair) for pair in zip(plain, checkpointed, strict=True))


def test_a_drafter_without_layers_can_not_be_checkpointed():
    with pytest.raises(ValueError, match=r"training\.gradient_checkpointing"):
        checkpoint_layers(nn.Linear(2, 2))


def test_what_is_wrapped_holds_the_parameters_of_the_drafter_and_no_others():
    drafter = ToyDrafter()
    loss = DrafterLoss(drafter, cross_entropy, Precision.fp32)
    assert {id(p) for p in loss.parameters()} == {id(p) for p in drafter.parameters()}
    assert loss(micro_batch(0)).num_tokens == micro_batch(0).num_tokens


class Asked(TorchDispatchMode):
    """Notes operations whose result the host needs: values, and sizes that depend on values.

    One is not ours: transformers looks once a pass whether sequences are packed (not if compiled).
    """

    ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype is torch.bool
            for given in args
            if isinstance(given, list | tuple)
            for index in given
        )
        if name in self.ASKING or by_mask:
            stack = traceback.extract_stack()
            if not any(frame.name == "find_packed_sequence_indices" for frame in stack):
                self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss", ["lk_hybrid", "forward_kl", "hard_labels"])
def test_the_objective_of_a_causal_lm_asks_the_device_for_nothing(loss: str):
    target = tiny_llama(0)
    batch = BatchStream(_examples(target), max_tokens=64, seed=0)(0)
    module = layers_of_target(target, [0])
    freeze_embeddings(module)
    objective = causal_lm.objective(module, _head(target), LossConfig(name=LossName(loss)))
    objective(module, batch)  # tables are copied to the device once
    with Asked() as asked:
        terms = objective(module, batch)
        terms.loss_sum.backward()
    assert asked.names == []
    with asked:
        int(terms.loss_sum)  # the control
        batch.labels[batch.labels > 3]
    assert asked.names == ["_local_scalar_dense", "index"]


def test_without_shards_the_whole_is_the_trained_module_itself():
    parts = toy_parts()
    assert gather_whole(parts) is parts.drafter


def test_deepspeed_is_refused_with_what_to_use():
    accelerator = SimpleNamespace(
        gradient_accumulation_steps=1, distributed_type=DistributedType.DEEPSPEED
    )
    with pytest.raises(ValueError, match=r"8gpu_fsdp2\.yaml"):
        make_parts(
            accelerator,  # type: ignore[arg-type]
            ToyDrafter(),
            cross_entropy,
            micro_batch,
            optim=OptimConfig(),
            accumulation_steps=1,
            precision=Precision.fp32,
        )
