"""The parallel drafter in training: blocks as they are drafted, useful at once, accepted as measured."""

import math

import pytest
import torch
from torch import Tensor

from distill.batches import Batch, Example, collate
from distill.draft_vocab import DraftVocab, full_vocab
from distill.losses import LossConfig, LossName
from distill.objectives.parallel import ParallelRecipe, ParallelSettings, make
from distill.parallel_blocks import block_states
from distill.position_heads import nearest_first, separating
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.engines import Engine
from specdec_runtime.hf_model import HFModel
from specdec_runtime.target import Target
from tests.conftest import tiny_llama
from tests.test_eagle3_objective import KEPT, PROMPT_LENGTH, parts_of, written_by

FROZEN = {"model.embed_tokens.weight", "lm_head.weight", "markov_w2.weight", "feature_scale"}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(model=HFModel(tiny_llama(0, num_layers=4)), eos_token_ids=(2,))


@pytest.fixture(scope="module")
def examples(target, tmp_path_factory) -> list[Example]:
    return written_by(target, 80, tmp_path_factory.mktemp("texts"), temperature=1.0)


@pytest.fixture(scope="module")
def start(target, examples) -> dict[str, Tensor]:
    return recipe_for(target).solve_start(examples[:40])


def recipe_for(target: Target, vocab: DraftVocab = KEPT, **settings) -> ParallelRecipe:
    torch.manual_seed(1)
    return make(ParallelSettings(**settings), parts_of(target, vocab))


def train(
    recipe: ParallelRecipe,
    batch: Batch,
    steps: int,
    loss: LossName,
    *,
    learning_rate: float = 3e-3,
) -> None:
    objective = recipe.objective(LossConfig(name=loss))
    trained = [p for p in recipe.module.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=learning_rate)
    for _ in range(steps):
        optimizer.zero_grad()
        terms = objective(recipe.module, batch)
        (terms.loss_sum / terms.num_tokens).backward()
        optimizer.step()


@torch.no_grad()
def test_the_rows_of_training_are_those_of_drafting(target, examples, start):
    """Every place of some blocks against the layer on its own cache; what the target makes from the
    block's token on is not seen."""
    recipe = recipe_for(target)
    recipe.put_start(start)
    network, drafter = recipe.module.eval(), recipe.drafter(engine=Engine.eager)
    network.layer.mlp.down_proj.weight.normal_()
    batch = collate(examples[:2])
    rows, places = torch.tensor([0, 0, 1]), torch.tensor([5, 9, 12])
    ids, features = batch.token_ids, batch.features
    for k, states in enumerate(block_states(network, ids, features, rows, places, 3)):
        for number, (row, place) in enumerate(zip(rows.tolist(), places.tolist(), strict=True)):
            begin = place - k
            block = drafter.block(int(ids[row, begin]), 3)
            entering = torch.cat([drafter.fuse(features[row, :begin].float()), block])[None]
            hidden = network.model(inputs_embeds=entering).last_hidden_state[0, place]
            assert torch.allclose(hidden, states[number], atol=1e-4), (k, number)
            changed = features.clone()
            changed[:, begin:] = 7.0
            again = list(block_states(network, ids, changed, rows, places, 3))[k]
            assert torch.equal(again[number], states[number])


def test_everything_trainable_moves_and_nothing_else(target, examples, start):
    batch = collate(examples[:3])
    norms = {f"model.layers.0.self_attn.{name}_norm.weight" for name in "qk"}
    recipe = recipe_for(target)
    recipe.put_start(start)
    network = recipe.module
    before = {name: p.clone() for name, p in network.named_parameters()}
    train(recipe, batch, 3, LossName.lk_hybrid)
    moved = {n for n, p in network.named_parameters() if not torch.equal(p, before[n])}
    assert moved == before.keys() - FROZEN - norms
    # Where the heads of the start look is not trained, where the others look is.
    name = "model.layers.0.self_attn.q_proj.weight"
    found, rows = network.get_parameter(name), 8 * (5 - 2)
    assert torch.equal(found[:rows], before[name][:rows])
    assert not torch.equal(found[-1], before[name][-1])
    free = recipe_for(target, solve_start=False)
    before = {name: p.clone() for name, p in free.module.named_parameters()}
    train(free, batch, 3, LossName.hard_labels)
    moved = {n for n, p in free.module.named_parameters() if not torch.equal(p, before[n])}
    assert moved == before.keys() - FROZEN


def test_a_solved_start_overlaps_more_than_a_random_one_at_every_place(target, examples, start):
    held_out, overlaps = collate(examples[40:60]), []
    for computed in ({}, start):
        recipe = recipe_for(target)
        recipe.put_start(computed)
        counts = recipe.objective(LossConfig())(recipe.module, held_out).counts
        names = ("overlap", "overlap_step_2", "overlap_step_3")
        overlaps.append([float(counts[name][0] / counts[name][1]) for name in names])
    assert all(b > a + 0.02 for a, b in zip(*overlaps, strict=True))


def test_wiring_gate_one_conversation_is_learnt_by_heart_and_fully_accepted(target, tmp_path):
    """Overfitted, the runtime accepts everything, as the teacher-forced figures say."""
    recipe = recipe_for(target, full_vocab(64), solve_start=False)
    example = written_by(target, 1, tmp_path, length=30)[0]
    batch = collate([example])
    train(recipe, batch, 60, LossName.hard_labels, learning_rate=0.02)
    counts = recipe.objective(LossConfig())(recipe.module.eval(), batch).counts
    agreement = float(counts["greedy_agreement"][0] / counts["greedy_agreement"][1])
    prompt = example.token_ids[:PROMPT_LENGTH].tolist()
    decoder = SpeculativeDecoder(target, recipe.drafter(engine=Engine.eager), num_draft_tokens=3)
    generation = decoder.generate([prompt], max_new_tokens=30, eos_token_id=[])
    assert generation.token_ids[0] == example.token_ids[PROMPT_LENGTH:].tolist()
    assert generation.stats.acceptance_rate >= 0.99
    assert agreement == pytest.approx(generation.stats.acceptance_rate, abs=0.01)
    batch.features = batch.features.roll(1, dims=1)
    shifted = recipe.objective(LossConfig())(recipe.module, batch).counts["greedy_agreement"]
    assert float(shifted[0] / shifted[1]) < 0.9


def test_held_out_overlap_is_the_acceptance_of_first_drafts_and_the_confidence(
    target, examples, start
):
    """At temperature 1, within five standard errors; another drafter's is far outside."""
    recipe = recipe_for(target)
    recipe.put_start(start)
    train(recipe, collate(examples[:40]), 10, LossName.lk_hybrid)
    held_out = collate(examples[40:])
    counts = recipe.objective(LossConfig())(recipe.module.eval(), held_out).counts
    overlap = float(counts["overlap"][0] / counts["overlap"][1])
    steps = [float(counts[f"overlap_step_{step}"][0] / held_out.num_tokens) for step in (2, 3)]
    confidence = float(counts["confidence"][0] / counts["confidence"][1])
    mean = (overlap + sum(steps)) / 3
    assert abs(confidence - mean) < 0.7 * abs(0.5 - mean)  # which it starts from
    decoder = SpeculativeDecoder(target, recipe.drafter(engine=Engine.eager), num_draft_tokens=1)
    prompts = [example.token_ids[:PROMPT_LENGTH].tolist() for example in examples[40:]]
    stats = decoder.generate(
        prompts, max_new_tokens=24, temperature=1.0, seed=7, eos_token_id=[]
    ).stats
    error = math.sqrt(overlap * (1 - overlap) / stats.num_drafted)
    assert abs(stats.acceptance_rate - overlap) < 5 * error + 0.01
    other = recipe_for(target)
    wrong = other.objective(LossConfig())(other.module, held_out).counts["overlap"]
    assert abs(stats.acceptance_rate - float(wrong[0] / wrong[1])) > 5 * error + 0.01


def test_heads_find_the_nearest_entry_of_their_sort():
    frequencies = 10_000.0 ** (-torch.arange(16) / 16)
    kernel = nearest_first(frequencies, 3, reach=200)
    angles = torch.arange(200)[:, None] * frequencies
    query, key = (part.view(2, 16) for part in kernel)
    scores = 64 * (
        (query[0] * key[0] + query[1] * key[1]) * angles.cos()
        + (query[0] * key[1] - query[1] * key[0]) * angles.sin()
    ).sum(-1)
    for place in range(3):
        assert float(scores[place + 1 :].softmax(0)[0]) > 0.7
    generator = torch.Generator().manual_seed(0)
    positive, negative = torch.randn(2, 50, 8, generator=generator) + torch.tensor(
        [[[3.0] * 8], [[-1.0] * 8]]
    )
    direction = separating(positive, negative)
    assert bool((positive @ direction > 0).all())
    assert float((negative @ direction < 0).float().mean()) > 0.9


def test_what_can_not_be_trained_is_refused(target, examples):
    recipe = recipe_for(target)
    bare = collate([Example("a", examples[0].token_ids, PROMPT_LENGTH, examples[0].rows)])
    with pytest.raises(ValueError, match="no recorded features"):
        recipe.objective(LossConfig())(recipe.module, bare)
    short = collate(examples[:1])
    short.spans = [(first - 4, last - 4) for first, last in short.spans]
    with pytest.raises(ValueError, match="too short for a draft"):
        recipe.objective(LossConfig())(recipe.module, short)
    wrong_settings = ({"steps": 0}, {"step_decay": 0.0}, {"markov_rank": 0}, {"context_heads": -1})
    for wrong in wrong_settings:
        with pytest.raises(ValueError, match=f"draft.{next(iter(wrong))}"):
            ParallelSettings(**wrong)
