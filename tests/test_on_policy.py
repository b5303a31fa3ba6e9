"""Batches from the runtime: which drafts are replayed, what they weigh, from which weights they come."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from distill.batches import BatchStream, Example
from distill.draft_vocab import full_vocab
from distill.losses import LossConfig, LossName, forward_kl, reverse_kl
from distill.objectives import causal_lm, early_exit
from distill.on_policy import (
    OnPolicyConfig,
    OnPolicyStream,
    Proposal,
    Proposer,
    is_on_policy,
    refusals,
    replay_loss,
    rollout,
    with_replay,
)
from distill.recipe import Recipe, TargetParts
from distill.signals import NoSignal, TargetHead
from specdec_runtime.engines import Engine, make_model
from specdec_runtime.target import Target
from tests.conftest import tiny_llama

PROMPTS = [[1, 5, 9, 33], [1, 60, 17, 40, 3], [1, 8]]


@pytest.fixture(scope="module")
def module() -> PreTrainedModel:
    return tiny_llama(0, num_layers=3)


@pytest.fixture(scope="module")
def target(module: PreTrainedModel) -> Target:
    return Target(model=make_model(module, engine="eager"), eos_token_ids=(2,))


def recipe_of(kind: str, target: Target, module: PreTrainedModel) -> Recipe:
    vocab = full_vocab(64)
    parts = TargetParts(target, module, vocab, TargetHead.of(module, vocab))
    if kind == "early_exit":
        return early_exit.make(early_exit.EarlyExitSettings(exit_layer=1), parts)
    return causal_lm.make(causal_lm.CausalLMSettings(layers=[0]), parts)


def test_the_fraction_is_met_and_spread():
    for fraction in (0.0, 0.1, 0.5, 1.0):
        chosen = [is_on_policy(number, fraction) for number in range(100)]
        assert sum(chosen) == round(100 * fraction)
    assert [is_on_policy(number, 0.5) for number in range(4)] == [False, True, False, True]


def test_drafts_are_refused_where_the_text_goes_on_differently():
    text = [7, 8, 10, 11, 12, 13]
    proposals = [
        Proposal(0, 2, [10, 11]),  # kept
        Proposal(0, 2, [10, 99, 12]),  # refused at the second
        Proposal(0, 5, [13, 50, 51]),  # past the end: not judged
        Proposal(0, 4, [90, 91]),  # refused at the first
    ]
    found = refusals(proposals, [text])
    assert [one.token_ids for one in found] == [[7, 8, 10, 99, 12], [7, 8, 10, 11, 90, 91]]
    assert [one.first_refused for one in found] == [3, 4]


@pytest.mark.parametrize("kind", ["causal_lm", "early_exit"])
def test_a_rollout_holds_texts_and_weighted_refused_drafts_with_the_targets_word_on_each(
    kind, target, module
):
    recipe = recipe_of(kind, target, module)
    config = OnPolicyConfig(fraction=1.0, num_draft_tokens=3, max_new_tokens=12, replays=4)
    batch = rollout(target, recipe.drafter(engine=Engine.eager), PROMPTS, config, seed=1)
    assert len(batch.token_ids) == len(PROMPTS)
    again = batch.replay
    assert again is not None
    assert len(again.token_ids) == 4
    assert float(again.weights.mean()) == pytest.approx(1.0)
    for part in (batch, again):
        hidden = module.model(input_ids=part.token_ids).last_hidden_state.flatten(0, 1)
        # Equal states at the positions mean that the target read the drafted tokens as well.
        torch.testing.assert_close(
            part.rows.hidden, hidden[part.positions].detach(), rtol=1e-4, atol=1e-4
        )
        labels = part.token_ids.flatten()[part.positions + 1]
        assert torch.equal(part.labels, labels)
    same = rollout(target, recipe.drafter(engine=Engine.eager), PROMPTS, config, seed=1)
    assert torch.equal(same.token_ids, batch.token_ids)
    assert torch.equal(same.replay.token_ids, again.token_ids)


def test_the_objective_adds_the_decayed_reverse_kl_of_the_refused_drafts(target, module):
    recipe = recipe_of("causal_lm", target, module)
    config = OnPolicyConfig(num_draft_tokens=3, max_new_tokens=12)
    batch = rollout(target, recipe.drafter(engine=Engine.eager), PROMPTS, config, seed=2)
    loss = LossConfig(name=LossName.forward_kl)
    both = with_replay(recipe.objective(loss), recipe.objective(replay_loss(loss)), 0.5)
    terms = both(recipe.module, batch)

    def logits_at(model, part):
        return model(input_ids=part.token_ids).logits.flatten(0, 1)[part.positions]

    with torch.no_grad():
        text, again = batch, batch.replay
        own = forward_kl(logits_at(recipe.module, text), logits_at(module, text).log_softmax(-1))
        refused = reverse_kl(
            logits_at(recipe.module, again), logits_at(module, again).log_softmax(-1)
        )
    expected = own.mean() + 0.5 * (again.weights * refused).sum() / again.weights.sum()
    assert float(terms.loss_sum.detach()) / terms.num_tokens == pytest.approx(
        float(expected), rel=1e-4
    )
    terms.loss_sum.backward()
    plain = both(recipe.module, replace(batch, replay=None))
    assert plain.counts.keys() == terms.counts.keys()


def _answer(seed: int) -> Example:
    ids = torch.randint(3, 64, (10,), generator=torch.Generator().manual_seed(seed))
    return Example(str(seed), ids, 4, NoSignal(6))


def streams(target, recipe, trained, proposer, config):
    stream = BatchStream([_answer(seed) for seed in range(6)], max_tokens=30, seed=0)
    return OnPolicyStream(
        stream,
        lambda number: [_answer(number % 6)],
        target=target,
        proposer=proposer,
        trained=trained,
        config=config,
        per_step=1,
        seed=4,
    )


def test_weights_are_refreshed_on_time_and_a_continued_run_sees_the_same_batches(target, module):
    """Training is played by adding to the weights; a run stopped in between gives equal batches."""
    config = OnPolicyConfig(
        fraction=0.5, refresh_every=3, num_draft_tokens=3, max_new_tokens=8, temperature=0.0
    )

    def change(trained, step):
        with torch.no_grad():
            for parameter in (p for p in trained.parameters() if p.requires_grad):
                noise = torch.Generator().manual_seed(step)
                parameter += 0.3 * torch.randn(parameter.shape, generator=noise)

    def proposer_of(recipe):
        copied = recipe.snapshot()
        return Proposer(copied.module, copied.drafter(engine=Engine.eager))

    recipe = recipe_of("causal_lm", target, module)
    proposer = proposer_of(recipe)
    stream = streams(target, recipe, recipe.module, proposer, config)
    seen, saved = [], None
    for step in range(8):
        seen.append(stream(step))
        if step == 4:  # between two refreshes
            weights = copy.deepcopy(recipe.module.state_dict())
            saved = {k: v.clone() for k, v in proposer.state().items()}, proposer.step, weights
        change(recipe.module, step)
    assert [batch.replay is not None for batch in seen].count(True) >= 2

    tensors, at, weights = saved
    assert at == 3
    again = recipe_of("causal_lm", target, module)
    again.module.load_state_dict(weights)
    continued = proposer_of(again)
    continued.restore(tensors, at)
    stream = streams(target, again, again.module, continued, config)
    for step in range(4, 8):
        batch = stream(step)
        assert torch.equal(batch.token_ids, seen[step].token_ids)
        if seen[step].replay is not None:
            assert torch.equal(batch.replay.token_ids, seen[step].replay.token_ids)
        change(again.module, step)

    stale = streams(target, again, again.module, proposer_of(again), config)
    with pytest.raises(AssertionError):
        stale(7)  # weights of another step would give other batches


@pytest.mark.parametrize(
    "setting", [{"fraction": 2.0}, {"refresh_every": 0}, {"replays": -1}, {"decay": 1.5}]
)
def test_a_setting_out_of_range_is_named_by_its_path(setting):
    (name,) = setting
    with pytest.raises(ValueError, match=rf"on_policy\.{name}"):
        OnPolicyConfig(**setting)
