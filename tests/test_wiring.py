"""The wiring gate: passes for every kind that is wired, ends the run for one that is not."""

import pytest
import torch
from transformers import PreTrainedModel

from distill.batches import BatchStream, Example
from distill.draft_vocab import full_vocab
from distill.live_signals import with_live_states
from distill.losses import LossConfig, LossName
from distill.objectives import causal_lm, eagle3, early_exit, parallel
from distill.recipe import Recipe, TargetParts
from distill.signals import NoSignal, TargetHead
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.engines import Engine, make_model
from specdec_runtime.target import Target
from tests.conftest import tiny_llama
from train.wiring import FirstTokens, check_wiring, decode_texts, require_agreement, teacher_forced

CPU = torch.device("cpu")
PROMPTS = [[1, n, 5 + n] for n in range(3, 43)]
KINDS = ["causal_lm", "early_exit"]
ALL_KINDS = [
    *KINDS,
    "eagle3",
    "parallel",
]  # by heart: test_eagle3_objective, test_parallel_objective
MEASURED = LossConfig(name=LossName.forward_kl, temperature=1.0)


@pytest.fixture(scope="module")
def module() -> PreTrainedModel:
    return tiny_llama(0, num_layers=3)


@pytest.fixture(scope="module")
def target(module: PreTrainedModel) -> Target:
    return Target(model=make_model(module), eos_token_ids=(2,))


def recipe_of(kind: str, target: Target, module: PreTrainedModel) -> Recipe:
    vocab = full_vocab(64)
    parts = TargetParts(target, module, vocab, TargetHead.of(module, vocab))
    torch.manual_seed(0)
    if kind == "early_exit":
        return early_exit.make(early_exit.EarlyExitSettings(exit_layer=1, mlp_size=128), parts)
    if kind == "eagle3":
        return eagle3.make(eagle3.Eagle3Settings(layer_ids=[1, 2], solve_start=False), parts)
    if kind == "parallel":
        return parallel.make(parallel.ParallelSettings(layer_ids=[1, 2], steps=2), parts)
    return causal_lm.make(causal_lm.CausalLMSettings(layers=[0]), parts)


def checked(target: Target, recipe: Recipe, drafter, module=None) -> list[FirstTokens]:
    return check_wiring(
        target,
        drafter,
        recipe.objective(MEASURED),
        recipe.module if module is None else module,
        PROMPTS,
        num_draft_tokens=3,
        max_new_tokens=16,
        device=CPU,
        feature_layers=recipe.feature_layers,
    )


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_training_and_runtime_agree_about_a_drafter_before_training(kind, target, module):
    recipe = recipe_of(kind, target, module)
    found = checked(target, recipe, recipe.drafter(engine=Engine.auto))
    assert [one.temperature for one in found] == [0.0, 1.0]
    assert all(one.num_rounds > 250 for one in found)
    assert found[0].decoded == pytest.approx(found[0].teacher_forced, abs=0.005)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_head_that_decodes_with_other_weights_ends_the_run(kind, target, module):
    recipe = recipe_of(kind, target, module)
    broken = recipe.snapshot()
    for weight in (p for p in broken.module.parameters() if p.requires_grad and p.dim() > 1):
        weight.data = weight.data.flip(0) + 0.3
    with pytest.raises(ValueError, match="training and runtime disagree about the first drafted"):
        checked(target, recipe, broken.drafter(engine=Engine.auto))


@pytest.mark.parametrize("kind", KINDS)
def test_one_conversation_learnt_by_heart_is_accepted_as_teacher_forcing_says(kind, target, module):
    prompt = [1, 7, 30, 12]
    text = SpeculativeDecoder(target).generate([prompt], max_new_tokens=32).token_ids[0]
    ids = torch.tensor([*prompt, *text])
    example = Example("one", ids, len(prompt), NoSignal(len(text)))
    (example,) = with_live_states(target, [example], max_positions=len(text))
    recipe = recipe_of(kind, target, module)
    terms = recipe.objective(LossConfig(name=LossName.hard_labels))
    optimizer = torch.optim.Adam([p for p in recipe.module.parameters() if p.requires_grad], 1e-2)
    batch = BatchStream([example], max_tokens=100, seed=0)(0)
    for _ in range(80):
        optimizer.zero_grad()
        terms(recipe.module, batch).loss_sum.div(batch.num_tokens).backward()
        optimizer.step()
    drafter = recipe.drafter(engine=Engine.auto)
    drafter.refresh()
    generation = SpeculativeDecoder(target, drafter, num_draft_tokens=3).generate(
        [prompt], max_new_tokens=32
    )
    assert generation.token_ids[0] == text
    assert generation.stats.acceptance_rate >= 0.99
    found = decode_texts(
        target,
        drafter,
        [prompt],
        num_draft_tokens=3,
        max_new_tokens=32,
        temperature=0.0,
        seed=0,
    )
    agreement, _ = teacher_forced(target, recipe.objective(MEASURED), recipe.module, found, CPU)
    assert agreement == sum(found[0].kept) == len(found[0].kept)


def test_chance_is_told_from_a_difference():
    require_agreement([FirstTokens(1.0, 400, 0.50, 0.55)])
    with pytest.raises(ValueError, match=r"teacher-forced 0\.550, decoded 0\.120"):
        require_agreement([FirstTokens(1.0, 400, 0.12, 0.55)])
    # Greedy, nothing is left to chance but a near-tie.
    require_agreement([FirstTokens(0.0, 400, 0.505, 0.5)])
    with pytest.raises(ValueError, match="temperature 0"):
        require_agreement([FirstTokens(0.0, 400, 0.44, 0.50)])
