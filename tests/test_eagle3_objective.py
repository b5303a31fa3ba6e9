"""The EAGLE-3 drafter in training: unrolled as it drafts, useful at once, accepted as measured."""

import math

import pytest
import torch
from transformers import PreTrainedModel

from distill.batches import Batch, BatchStream, Example, collate
from distill.draft_vocab import DraftVocab, full_vocab
from distill.eagle3_unroll import Window, step_mask, unrolled
from distill.features import FeatureFolder, record_features
from distill.losses import LossConfig, LossName
from distill.objectives.eagle3 import Eagle3Recipe, Eagle3Settings, make
from distill.recipe import TargetParts
from distill.signals import TargetHead, live_rows, split_rows
from distill.state_recipe import default_layer_ids
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.engines import Engine
from specdec_runtime.hf_model import HFModel
from specdec_runtime.target import Target
from tests.conftest import tiny_llama

KEPT = DraftVocab(torch.tensor([token for token in range(64) if token % 5]), 64)
PROMPT_LENGTH = 6


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(model=HFModel(tiny_llama(0, num_layers=4)), eos_token_ids=(2,))


def parts_of(target: Target, vocab: DraftVocab = KEPT) -> TargetParts:
    module = target.model.module
    return TargetParts(target, module, vocab, TargetHead.of(module, vocab))


def recipe_for(target: Target, vocab: DraftVocab = KEPT, **settings) -> Eagle3Recipe:
    torch.manual_seed(1)
    return make(Eagle3Settings(**settings), parts_of(target, vocab))


def written_by(target: Target, count: int, tmp_path, *, length: int = 24, **sampling):
    """Texts that the target continues, with its signal and features."""
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(3, 64, (count, PROMPT_LENGTH), generator=generator).tolist()
    decoder = SpeculativeDecoder(target)
    texts = decoder.generate(prompts, max_new_tokens=length, seed=0, eos_token_id=[], **sampling)
    ids = torch.cat([torch.tensor(prompts), torch.tensor(texts.token_ids)], dim=1)
    places = torch.arange(ids.numel()).view_as(ids)[:, PROMPT_LENGTH - 1 : -1].flatten()
    lengths = torch.full((count,), ids.shape[1])
    signal = live_rows(target.model, ids, lengths, places, real_vocab_size=64)
    examples = [
        Example(str(number), row, PROMPT_LENGTH, rows)
        for number, (row, rows) in enumerate(
            zip(ids, split_rows(signal, [length] * count), strict=True)
        )
    ]
    layers = default_layer_ids(target.model.num_layers)
    return record_features(target.model, examples, FeatureFolder(tmp_path / "features", layers))


def train(
    recipe: Eagle3Recipe,
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


def test_a_step_sees_the_recorded_entries_up_to_its_draft_and_the_draft_itself():
    everything = torch.arange(5)[None]
    mask = step_mask(everything, 5, 2).view(5, 3, 5)
    # Entry 4 of the third step belongs to the draft that began at 2: entries 0..2, then 3, then 4.
    assert mask[4].tolist() == [
        [True, True, True, False, False],
        [False, False, False, True, False],
        [False, False, False, False, True],
    ]
    assert torch.equal(step_mask(everything, 5, 0)[0], torch.ones(5, 5).tril().bool())
    # The same for windows that begin at 1 and 2; of the later steps they hold 3 entries.
    part = step_mask(torch.tensor([[1, 2, 3], [2, 3, 4]]), 5, 2)
    assert torch.equal(part[1, 2], torch.cat([mask[4, 0], mask[4, 1, 2:], mask[4, 2, 2:]]))
    assert torch.equal(part[0, 2], torch.cat([mask[3, 0], mask[3, 1, 1:4], mask[3, 2, 1:4]]))


@pytest.mark.parametrize("norms", ["eagle3", "eagle3.1"])
@torch.no_grad()
def test_unrolled_states_are_those_of_drafting(target, tmp_path, norms):
    """Every step of a draft from every position, against the layer on its own cache."""
    recipe = recipe_for(target, norms=norms)
    network = recipe.module.eval()
    examples = written_by(target, 2, tmp_path, length=8, temperature=1.0)
    batch = collate(examples)
    everything = Window(torch.zeros(2, dtype=torch.int64), batch.token_ids.shape[1] - 1)
    steps = list(unrolled(network.model, batch.token_ids, batch.features, 3, everything))
    window = Window(torch.tensor([2, 4]), 6)
    for whole, part in zip(
        steps, unrolled(network.model, batch.token_ids, batch.features, 3, window), strict=True
    ):
        assert torch.allclose(part[0, 2:], whole[0, 4:8], atol=1e-5)
        assert torch.allclose(part[1, 2:], whole[1, 6:10], atol=1e-5)
    model, handed_on = HFModel(network), -1 if norms == "eagle3.1" else 1
    for row, start in ((0, 0), (0, 5), (1, 9)):
        cache = model.new_cache(1, 20)
        tokens = batch.token_ids[row : row + 1, 1:]
        entering = network.model.fuse(batch.features[row : row + 1, : start + 1].float())
        fed = tokens[:, : start + 1]
        for step, states in enumerate(steps):
            output = model.forward(
                fed, cache, hidden_in=entering, layers=(0, 1), hidden_layers=(-1, handed_on)
            )
            assert torch.allclose(output.hidden[-1][0, -1], states[row, start + step], atol=1e-4)
            entering = output.hidden[handed_on][:, -1:]
            fed = tokens[:, start + step + 1 : start + step + 2]


def test_everything_trainable_moves_and_nothing_else(target, tmp_path):
    batch = collate(written_by(target, 3, tmp_path, length=8))
    for train_head in (False, True):
        recipe = recipe_for(target, train_head=train_head)
        network = recipe.module
        with torch.no_grad():
            network.model.layer.self_attn.o_proj.weight.normal_()
        before = {name: p.clone() for name, p in network.named_parameters()}
        train(recipe, batch, 2, LossName.lk_hybrid)
        moved = {n for n, p in network.named_parameters() if not torch.equal(p, before[n])}
        frozen = {"model.embed_tokens.weight"} | (set() if train_head else {"lm_head.weight"})
        assert moved == before.keys() - frozen


def test_the_loss_is_the_weighted_mean_of_its_steps(target, tmp_path):
    batch = collate(written_by(target, 2, tmp_path, length=8))
    losses = {}
    for steps, decay in ((1, 0.5), (2, 0.5), (2, 1.0)):
        recipe = recipe_for(target, steps=steps, step_decay=decay)
        losses[steps, decay] = recipe.objective(LossConfig())(recipe.module, batch).loss_sum
    first, halved, equal = (float(loss.detach()) for loss in losses.values())
    second = 2 * equal - first
    assert halved == pytest.approx((first + 0.5 * second) / 1.5, rel=1e-4)


def test_a_solved_start_overlaps_more_than_a_random_one_at_every_step(target, tmp_path):
    examples = written_by(target, 60, tmp_path, temperature=1.0)
    held_out = collate(examples[40:])
    overlaps = {}
    for solved in (False, True):
        recipe = recipe_for(target, solve_start=solved, steps=3)
        recipe.put_start(recipe.solve_start(examples[:40]))
        counts = recipe.objective(LossConfig())(recipe.module, held_out).counts
        names = ("overlap", "overlap_step_2", "overlap_step_3")
        overlaps[solved] = [float(counts[name][0] / counts[name][1]) for name in names]
    assert all(a > b + 0.02 for a, b in zip(overlaps[True], overlaps[False], strict=True))


def test_wiring_gate_one_conversation_is_learnt_by_heart_and_fully_accepted(target, tmp_path):
    """Overfitted, the runtime accepts everything, as the teacher-forced figures say."""
    recipe = recipe_for(target, full_vocab(64), steps=3)
    example = written_by(target, 1, tmp_path, length=40)[0]
    recipe.put_start(recipe.solve_start([example]))
    batch = collate([example])
    train(recipe, batch, 40, LossName.hard_labels, learning_rate=0.01)
    counts = recipe.objective(LossConfig())(recipe.module.eval(), batch).counts
    agreement = float(counts["greedy_agreement"][0] / counts["greedy_agreement"][1])
    drafter = recipe.drafter(engine=Engine.eager)
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=3)
    prompt = example.token_ids[:PROMPT_LENGTH].tolist()
    generation = decoder.generate([prompt], max_new_tokens=40, eos_token_id=[])
    assert generation.token_ids[0] == example.token_ids[PROMPT_LENGTH:].tolist()
    assert generation.stats.acceptance_rate >= 0.99
    assert agreement == pytest.approx(generation.stats.acceptance_rate, abs=0.01)
    batch.features = batch.features.roll(1, dims=1)
    shifted = recipe.objective(LossConfig())(recipe.module, batch).counts["greedy_agreement"]
    assert float(shifted[0] / shifted[1]) < 0.9


def test_held_out_overlap_is_the_acceptance_of_first_drafts(target, tmp_path):
    """At temperature 1, within five standard errors; another drafter's is far outside."""
    recipe = recipe_for(target)
    examples = written_by(target, 90, tmp_path, temperature=1.0)
    recipe.put_start(recipe.solve_start(examples[:40]))
    held_out = collate(examples[40:])
    counts = recipe.objective(LossConfig())(recipe.module.eval(), held_out).counts
    overlap = float(counts["overlap"][0] / counts["overlap"][1])
    decoder = SpeculativeDecoder(target, recipe.drafter(engine=Engine.eager), num_draft_tokens=1)
    prompts = [example.token_ids[:PROMPT_LENGTH].tolist() for example in examples[40:]]
    stats = decoder.generate(
        prompts, max_new_tokens=24, temperature=1.0, seed=7, eos_token_id=[]
    ).stats
    error = math.sqrt(overlap * (1 - overlap) / stats.num_drafted)
    assert abs(stats.acceptance_rate - overlap) < 5 * error + 0.01
    other = recipe_for(target, solve_start=False)
    wrong = other.objective(LossConfig())(other.module, held_out).counts["overlap"]
    assert abs(stats.acceptance_rate - float(wrong[0] / wrong[1])) > 5 * error + 0.01


def test_features_are_recorded_once_and_found_again(target, tmp_path):
    examples = written_by(target, 4, tmp_path, length=6)
    kept = FeatureFolder(tmp_path / "features", default_layer_ids(4))
    files = sorted(kept.folder.glob("*.safetensors"))
    again = record_features(None, examples, kept)  # no pass is needed
    assert sorted(kept.folder.glob("*.safetensors")) == files
    assert torch.equal(again[2].features, examples[2].features)
    with torch.no_grad():
        module: PreTrainedModel = target.model.module
        output = module(examples[2].token_ids[None], output_hidden_states=True)
    layers = default_layer_ids(4)
    expected = torch.cat([output.hidden_states[k] for k in layers], dim=-1)[0]
    assert torch.allclose(again[2].features.float(), expected, atol=2e-2)
    files[0].write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="damaged"):
        record_features(None, examples, kept)


def test_what_can_not_be_trained_is_refused(target, tmp_path):
    recipe = recipe_for(target, steps=3)
    examples = written_by(target, 1, tmp_path, length=8)
    bare = collate([Example("a", examples[0].token_ids, PROMPT_LENGTH, examples[0].rows)])
    with pytest.raises(ValueError, match="no recorded features"):
        recipe.objective(LossConfig())(recipe.module, bare)
    short = BatchStream(examples, max_tokens=64, seed=0)(0)
    short.spans = [(first - 4, last - 4) for first, last in short.spans]
    with pytest.raises(ValueError, match=r"too short for a draft"):
        recipe.objective(LossConfig())(recipe.module, short)
    for wrong in ({"steps": 0}, {"step_decay": 0.0}, {"norms": "none"}, {"context_heads": -1}):
        with pytest.raises(ValueError, match=f"draft.{next(iter(wrong))}"):
            Eagle3Settings(**wrong)
    assert default_layer_ids(30) == [2, 15, 27]
    assert default_layer_ids(1) == [0]
