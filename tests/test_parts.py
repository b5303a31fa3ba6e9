"""What a step works on: the drafter wrapped, its layers checkpointed, and what is refused."""

import pytest
import torch
from torch import nn

from distill.adapters import LoraSettings, add_lora
from tests.conftest import tiny_llama
from tests.toy_training import ToyDrafter, cross_entropy, micro_batch, toy_parts
from train.parts import DrafterLoss, checkpoint_layers, gather_whole
from train.precision import Precision


def gradients(*, checkpointed: bool, rank: int) -> list[torch.Tensor]:
    """Of a tiny Llama with dropout, whose embeddings are frozen; with adapters of a rank above 0."""
    module = tiny_llama(0)
    if rank:
        torch.manual_seed(1)
        add_lora(module, LoraSettings(rank=rank, dropout=0.5))
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


@pytest.mark.parametrize("rank", [0, 2], ids=["layers", "adapters"])
def test_checkpointed_layers_give_the_same_gradients_dropout_included(rank: int):
    plain, checkpointed = (gradients(checkpointed=given, rank=rank) for given in (False, True))
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


def test_without_shards_the_whole_is_the_trained_module_itself():
    parts = toy_parts()
    assert gather_whole(parts) is parts.drafter
