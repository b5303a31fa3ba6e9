"""The causal LM drafter: made of the target's parts, trained where it should, useful at once."""

import pytest
import torch
from transformers import PreTrainedModel

from distill.batches import BatchStream, Example
from distill.draft_vocab import DraftVocab
from distill.losses import LossConfig
from distill.objectives.causal_lm import DraftConfig, fit_head, make_module, objective, states
from distill.signals import TargetHead, TargetRows

PROMPT_LENGTH = 4
KEPT = 40  # tokens of the draft vocabulary


@torch.no_grad()
def _examples(target: PreTrainedModel, count: int = 24) -> list[Example]:
    """Random texts with the target's true signal."""
    generator = torch.Generator().manual_seed(0)
    examples = []
    for number in range(count):
        ids = torch.randint(3, 64, (12 + number % 5,), generator=generator)
        hidden = target.model(input_ids=ids[None]).last_hidden_state[0, PROMPT_LENGTH - 1 : -1]
        logits = target.lm_head(hidden)
        rows = TargetRows(hidden, logits.logsumexp(-1), logits.argmax(-1))
        examples.append(Example(str(number), ids, PROMPT_LENGTH, rows))
    return examples


def _head(target: PreTrainedModel) -> TargetHead:
    return TargetHead.of(target, DraftVocab(torch.arange(KEPT), 64))


def test_a_drafter_with_all_layers_is_the_target(tiny_target: PreTrainedModel) -> None:
    module = make_module(tiny_target, [0, 1]).eval()
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(module(input_ids=ids).logits, tiny_target(input_ids=ids).logits)


def test_layers_are_taken_in_the_order_given(tiny_target: PreTrainedModel) -> None:
    module = make_module(tiny_target, [1])
    ours, theirs = module.model.layers[0], tiny_target.model.layers[1]
    assert torch.equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight)
    assert ours.mlp.up_proj.weight is not theirs.mlp.up_proj.weight


def test_embeddings_and_head_are_frozen_and_layers_move(tiny_target: PreTrainedModel) -> None:
    module = make_module(tiny_target, [0])
    examples = _examples(tiny_target)
    fit_head(module, examples)
    batch = BatchStream(examples, max_tokens=64, seed=0)(0)
    objective(module, _head(tiny_target), LossConfig())(module, batch).loss_sum.backward()
    moved = {name for name, p in module.named_parameters() if p.grad is not None}
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    assert moved == trainable
    assert trainable == {name for name in moved if name.startswith(("model.layers", "model.norm"))}


def test_a_fitted_head_overlaps_more_than_the_bare_one(tiny_target: PreTrainedModel) -> None:
    examples = _examples(tiny_target, 60)
    held_out = BatchStream(examples[40:], max_tokens=4096, seed=0)(0)
    overlaps = []
    for fitted in (False, True):
        module = make_module(tiny_target, [0])
        if fitted:
            fit_head(module, examples[:40])
        terms = objective(module, _head(tiny_target), LossConfig())(module, held_out)
        numerator, denominator = terms.counts["overlap"]
        overlaps.append(float(numerator / denominator))
    assert overlaps[1] > overlaps[0]


def test_the_loss_of_the_target_itself_is_zero(tiny_target: PreTrainedModel) -> None:
    examples = _examples(tiny_target)
    module = make_module(tiny_target, [0, 1]).eval()
    full = TargetHead.of(tiny_target, DraftVocab(torch.arange(64), 64))
    batch = BatchStream(examples, max_tokens=4096, seed=0)(0)
    terms = objective(module, full, LossConfig())(module, batch)
    assert float(terms.loss_sum.detach()) / terms.num_tokens == pytest.approx(0.0, abs=1e-5)
    agreement, total = terms.counts["greedy_agreement"]
    assert float(agreement) == float(total) == terms.num_tokens


def test_states_are_those_that_predict_the_answer(tiny_target: PreTrainedModel) -> None:
    examples = _examples(tiny_target, 3)
    module = make_module(tiny_target, [0, 1]).eval()
    batch = BatchStream(examples, max_tokens=4096, seed=0)(0)
    with torch.no_grad():
        # The signal was computed on each text alone: equal states mean right positions.
        assert torch.allclose(states(module, batch), batch.rows.hidden, atol=1e-5)


@pytest.mark.parametrize("layers", [[], [-1]])
def test_a_drafter_needs_layers(layers: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        DraftConfig(layers=layers)


def test_a_layer_that_the_target_lacks_is_named(tiny_target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="layer 7, the target has layers 0 to 1"):
        make_module(tiny_target, [0, 7])
