"""The causal LM drafter: made of the target's parts, trained where it should, useful at once."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaForCausalLM, PreTrainedModel

from distill.adapters import LoraSettings
from distill.batches import BatchStream, Example, collate
from distill.causal_lm_modules import from_scratch, layers_of_target
from distill.chunked_head import position_overlaps
from distill.draft_vocab import DraftVocab
from distill.losses import LossConfig, LossName, SelectionConfig
from distill.objectives.causal_lm import (
    CausalLMSettings,
    Source,
    draft_head,
    fit_head,
    freeze_embeddings,
    make,
    objective,
    reference_of,
    states,
)
from distill.recipe import TargetParts
from distill.signals import TargetHead, TargetRows, rows_at
from specdec_runtime.engines import Engine
from specdec_runtime.int8_grid import is_rounded
from specdec_runtime.target import as_target
from tests.conftest import tiny_llama

PROMPT_LENGTH = 4
KEPT = 40  # tokens of the draft vocabulary


@torch.no_grad()
def _examples(target: PreTrainedModel, count: int = 24) -> list[Example]:
    """Random texts with the target's true signal."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 64, (12 + n % 5,), generator=generator) for n in range(count)]
    last = target.model(input_ids=pad_sequence(texts, batch_first=True)).last_hidden_state
    examples = []
    for number, ids in enumerate(texts):
        hidden = last[number, PROMPT_LENGTH - 1 : len(ids) - 1]
        logits = target.lm_head(hidden)
        rows = TargetRows(hidden, logits.logsumexp(-1), logits.argmax(-1))
        examples.append(Example(str(number), ids, PROMPT_LENGTH, rows))
    return examples


def _head(target: PreTrainedModel) -> TargetHead:
    return TargetHead.of(target, DraftVocab(torch.arange(KEPT), 64))


def test_a_drafter_with_all_layers_is_the_target(tiny_target: PreTrainedModel) -> None:
    module = layers_of_target(tiny_target, [0, 1]).eval()
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(module(input_ids=ids).logits, tiny_target(input_ids=ids).logits)


def test_layers_are_taken_in_the_order_given(tiny_target: PreTrainedModel) -> None:
    module = layers_of_target(tiny_target, [1])
    ours, theirs = module.model.layers[0], tiny_target.model.layers[1]
    assert torch.equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight)
    assert ours.mlp.up_proj.weight is not theirs.mlp.up_proj.weight


def test_embeddings_and_head_are_frozen_and_layers_move(tiny_target: PreTrainedModel) -> None:
    module = layers_of_target(tiny_target, [0])
    freeze_embeddings(module)
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
        module = layers_of_target(tiny_target, [0])
        if fitted:
            fit_head(module, examples[:40])
        terms = objective(module, _head(tiny_target), LossConfig())(module, held_out)
        numerator, denominator = terms.counts["overlap"]
        overlaps.append(float(numerator / denominator))
    assert overlaps[1] > overlaps[0]


def test_the_loss_of_the_target_itself_is_zero(tiny_target: PreTrainedModel) -> None:
    examples = _examples(tiny_target)
    module = layers_of_target(tiny_target, [0, 1]).eval()
    full = TargetHead.of(tiny_target, DraftVocab(torch.arange(64), 64))
    batch = BatchStream(examples, max_tokens=4096, seed=0)(0)
    terms = objective(module, full, LossConfig())(module, batch)
    assert float(terms.loss_sum.detach()) / terms.num_tokens == pytest.approx(0.0, abs=1e-5)
    agreement, total = terms.counts["greedy_agreement"]
    assert float(agreement) == float(total) == terms.num_tokens


@pytest.mark.parametrize("name", [LossName.lk_hybrid, LossName.forward_kl, LossName.ce_tv])
def test_a_batch_with_dead_rows_has_the_loss_of_its_live_row(
    name: LossName, tiny_target: PreTrainedModel
) -> None:
    live = _examples(tiny_target, 1)[0]
    nothing = rows_at(live.rows, torch.zeros(0, dtype=torch.int64))
    dead = [Example(str(i), torch.arange(3, 20 + i), 17 + i, nothing) for i in range(3)]
    module = layers_of_target(tiny_target, [0]).eval()
    loss = objective(module, _head(tiny_target), LossConfig(name=name))
    alone, mixed = (loss(module, collate(rows)) for rows in ([live], [*dead[:2], live, dead[2]]))
    assert mixed.num_tokens == alone.num_tokens == live.num_tokens
    assert float(mixed.loss_sum.detach()) == pytest.approx(float(alone.loss_sum.detach()), rel=1e-5)
    mixed.loss_sum.backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in module.parameters())


def test_masters_of_a_bfloat16_target_are_float32_and_the_folder_is_what_it_says(
    tiny_target: PreTrainedModel, tmp_path: Path
) -> None:
    stored = copy.deepcopy(tiny_target).bfloat16()
    stored.config.dtype = torch.bfloat16
    recipe = make(CausalLMSettings(layers=[0]), parts_of(stored))
    assert {p.dtype for p in recipe.module.parameters()} == {torch.float32}
    assert {p.dtype for p in stored.parameters()} == {torch.bfloat16}
    recipe.written(torch.bfloat16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    tensors = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_states_are_those_that_predict_the_answer(tiny_target: PreTrainedModel) -> None:
    examples = _examples(tiny_target, 3)
    module = layers_of_target(tiny_target, [0, 1]).eval()
    batch = BatchStream(examples, max_tokens=4096, seed=0)(0)
    with torch.no_grad():
        # The signal was computed on each text alone: equal states mean right positions.
        assert torch.allclose(states(module, batch), batch.rows.hidden, atol=1e-5)


def parts_of(target: PreTrainedModel) -> TargetParts:
    head = _head(target)
    return TargetParts(as_target(target), target, head.vocab, head)


ONE_STEP = {
    "layers of the target": CausalLMSettings(layers=[0]),
    "with embeddings": CausalLMSettings(layers=[0], train_embeddings=True),
    "fitted head, with embeddings": CausalLMSettings(layers=[0], train_embeddings=True),
    "new layers": CausalLMSettings(source=Source.scratch, num_layers=1),
    "all new": CausalLMSettings(source=Source.scratch, num_layers=1, hidden_size=16),
    "stock model": CausalLMSettings(source=Source.model, model="FOLDER"),
    "stock model with adapters": CausalLMSettings(
        source=Source.model, model="FOLDER", lora=LoraSettings(rank=4)
    ),
}


@pytest.mark.parametrize("name", ONE_STEP)
def test_two_steps_move_every_trainable_parameter_and_nothing_else(
    name: str, tiny_target: PreTrainedModel, tmp_path: Path
) -> None:
    settings = ONE_STEP[name]
    if settings.model is not None:
        tiny_llama(7, num_layers=1).save_pretrained(tmp_path)
        settings = replace(settings, model=str(tmp_path))
    recipe = make(settings, parts_of(tiny_target))
    examples = _examples(tiny_target)
    if name.startswith("fitted"):
        recipe.put_start(recipe.solve_start(examples))
    module = recipe.module.train()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    target_before = {key: value.clone() for key, value in tiny_target.state_dict().items()}
    trainable = {key for key, p in module.named_parameters() if p.requires_grad}
    terms = recipe.objective(LossConfig())
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.5)
    for number in range(2):  # an adapter's first half moves once the second is no longer zero
        batch = BatchStream(examples, max_tokens=4096, seed=0)(number)
        optimizer.zero_grad()
        terms(module, batch).loss_sum.div(batch.num_tokens).backward()
        optimizer.step()
    after = module.state_dict()
    tied = {"lm_head.weight"} if module.config.tie_word_embeddings else set()
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert moved - tied == trainable - tied
    assert all(p.grad is None for p in tiny_target.parameters())
    now = tiny_target.state_dict()
    assert all(torch.equal(value, now[key]) for key, value in target_before.items())


def test_dropout_is_on_for_the_drafter_while_it_trains_and_never_for_the_target() -> None:
    target = tiny_llama(0)
    target.config.attention_dropout = 0.5
    for layer in target.model.layers:
        layer.self_attn.attention_dropout = 0.5
    module = layers_of_target(target, [0])
    model = as_target(target.train()).model
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(4))
    batch = BatchStream(_examples(target.eval(), 4), max_tokens=4096, seed=0)(0)
    target.train()
    scored = [model.forward(ids, model.new_cache(2, 12)).logits for _ in range(2)]
    assert torch.equal(scored[0], scored[1])
    for training, same in ((True, False), (False, True)):
        module.train(training)
        found = [states(module, batch) for _ in range(2)]
        assert torch.equal(found[0], found[1]) == same


def test_adapters_start_as_the_stock_model_and_merge_without_a_difference(
    tiny_target: PreTrainedModel, tmp_path: Path
) -> None:
    stock = tiny_llama(7, num_layers=1)
    stock.save_pretrained(tmp_path)
    settings = CausalLMSettings(
        source=Source.model, model=str(tmp_path), lora=LoraSettings(rank=4, dropout=0.5)
    )
    recipe = make(settings, parts_of(tiny_target))
    module, ids = recipe.module.eval(), torch.randint(0, 64, (2, 9))
    with torch.no_grad():
        assert torch.equal(module(input_ids=ids).logits, stock(input_ids=ids).logits)
        for key, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(len(key)))
        changed = module(input_ids=ids).logits
    assert not torch.allclose(changed, stock(input_ids=ids).logits, atol=0.1)

    written = recipe.written(torch.float32)
    report = recipe.writing_report(written)
    assert report["merge_largest_logit_difference"] < 1e-4  # of logits up to about 20
    assert report["written_greedy_agreement"] == 1.0
    written.save_pretrained(tmp_path / "merged")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=ids).logits, changed, atol=1e-4)
    assert (
        recipe.writing_report(recipe.written(torch.bfloat16))["written_largest_logit_difference"]
        > 0
    )

    drafter = recipe.drafter(engine=Engine.eager)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    drafter.refresh()
    assert not drafter.module.lm_head.weight.any()


def test_a_bfloat16_folder_is_rounded_once_for_all_who_read_it(
    tiny_target: PreTrainedModel,
) -> None:
    parts = parts_of(tiny_target)
    recipe = make(CausalLMSettings(layers=[0]), parts)
    written = recipe.written(torch.bfloat16)
    matrices = [part.weight for part in written.modules() if isinstance(part, nn.Linear)]
    assert matrices
    assert all(map(is_rounded, matrices))
    plain = make(CausalLMSettings(layers=[0], int8_weights=False), parts).written(torch.bfloat16)
    assert not is_rounded(plain.lm_head.weight)
    assert torch.equal(plain.lm_head.weight, recipe.module.lm_head.weight.bfloat16())
    kept = written.get_input_embeddings().weight
    assert torch.equal(kept, plain.get_input_embeddings().weight)
    assert torch.equal(recipe.written(torch.float32).lm_head.weight, recipe.module.lm_head.weight)


def test_a_smaller_drafter_keeps_the_targets_head_size(tiny_target: PreTrainedModel) -> None:
    module = from_scratch(tiny_target, num_layers=3, hidden_size=24)
    config = module.config
    assert (config.num_attention_heads, config.num_hidden_layers) == (3, 3)
    assert config.intermediate_size == 48
    with pytest.raises(ValueError, match="multiple of the target's head size 8"):
        from_scratch(tiny_target, num_layers=1, hidden_size=20)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"source": Source.model}, "source=model needs a model"),
        ({"model": "folder"}, "source=model needs a model"),
        ({"source": Source.scratch, "lora": LoraSettings(rank=2)}, "adapts given weights"),
        ({"num_layers": 0}, "draft.num_layers must be at least 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CausalLMSettings(**settings)


def test_the_expected_length_needs_a_trained_start(tiny_target: PreTrainedModel) -> None:
    recipe = make(CausalLMSettings(layers=[0]), parts_of(tiny_target))
    with pytest.raises(ValueError, match="starts from a trained drafter only"):
        recipe.objective(LossConfig(name=LossName.expected_length))


def test_positions_are_selected_by_the_overlap_of_a_reference_folder(
    tiny_target: PreTrainedModel, tmp_path: Path
) -> None:
    layers_of_target(tiny_target, [0, 1]).save_pretrained(tmp_path)  # the target: overlap 1
    vocab = DraftVocab(torch.arange(64), 64)
    head = TargetHead.of(tiny_target, vocab)
    recipe = make(
        CausalLMSettings(layers=[0]), TargetParts(as_target(tiny_target), tiny_target, vocab, head)
    )
    batch = BatchStream(_examples(tiny_target), max_tokens=4096, seed=0)(0)
    device = torch.device("cpu")
    reference = reference_of(str(tmp_path), head, LossConfig(), device)
    assert torch.allclose(reference(batch), torch.ones(batch.num_tokens), atol=1e-4)

    # Of the positions, those count where the drafter itself overlaps least.
    config = LossConfig(
        name=LossName.total_variation,
        selection=SelectionConfig(share=0.25, reference=str(tmp_path)),
    )
    with torch.no_grad():
        own = position_overlaps(
            states(recipe.module, batch), draft_head(recipe.module, vocab), head, batch.rows, config
        )
    worst = (1 - own).sort(descending=True).values[: round(0.25 * len(own))]
    found = float(recipe.objective(config)(recipe.module, batch).loss_sum.detach())
    assert found / batch.num_tokens == pytest.approx(float(worst.mean()), rel=1e-4)

    with pytest.raises(ValueError, match="another draft vocabulary"):
        reference_of(str(tmp_path), _head(tiny_target), LossConfig(), device)


@pytest.mark.parametrize("layers", [[], [-1]])
def test_a_drafter_needs_layers(layers: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        CausalLMSettings(layers=layers)


def test_a_layer_that_the_target_lacks_is_named(tiny_target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="layer 7, the target has layers 0 to 1"):
        layers_of_target(tiny_target, [0, 7])
