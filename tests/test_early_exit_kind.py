"""The trained early exit: its start, what it trains, its folder, and exact text with it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from distill.batches import BatchStream, Example
from distill.draft_vocab import DraftVocab
from distill.losses import LossConfig
from distill.objectives.early_exit import EarlyExitSettings, make
from distill.recipe import TargetParts
from distill.signals import TargetHead, TargetRows
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.engines import Engine, make_model
from specdec_runtime.exit_adapter import ADAPTER_NAME, ReducedHead
from specdec_runtime.formats import (
    DRAFT_VOCAB_NAME,
    DrafterManifest,
    TargetRecord,
    read_manifest,
    write_drafter,
)
from specdec_runtime.hf_model import HFModel
from specdec_runtime.loading import load_drafter
from specdec_runtime.target import Target
from tests.conftest import tiny_llama

PROMPTS = [[1, 5, 9, 33], [1, 60, 2, 17, 40], [1, 8]]
SOME = DraftVocab(torch.arange(3, 60, 2), 64)


@pytest.fixture(scope="module")
def module() -> PreTrainedModel:
    return tiny_llama(0, num_layers=4)


@pytest.fixture(scope="module", params=["eager", "auto"])
def target(module: PreTrainedModel, request: pytest.FixtureRequest) -> Target:
    return Target(model=make_model(module, engine=request.param), eos_token_ids=(2,))


@torch.no_grad()
def examples_of(module: PreTrainedModel, count: int = 60) -> list[Example]:
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 64, (12 + n % 5,), generator=generator) for n in range(count)]
    states = module.model(input_ids=pad_sequence(texts, batch_first=True)).last_hidden_state
    found = []
    for number, ids in enumerate(texts):
        hidden = states[number, 3 : len(ids) - 1]
        logits = module.lm_head(hidden)
        rows = TargetRows(hidden, logits.logsumexp(-1), logits.argmax(-1))
        found.append(Example(str(number), ids, 4, rows))
    return found


def recipe_of(target, module, vocab=SOME, **settings):
    head = TargetHead.of(module, vocab)
    return make(
        EarlyExitSettings(exit_layer=2, **settings), TargetParts(target, module, vocab, head)
    )


def overlap_of(recipe, examples):
    batch = BatchStream(examples, max_tokens=10**6, seed=0)(0)
    with torch.no_grad():
        numerator, denominator = recipe.objective(LossConfig())(recipe.module, batch).counts[
            "overlap"
        ]
    return float(numerator / denominator)


def written(recipe, folder: Path, target: Target) -> Path:
    vocab = {"d2t": SOME.d2t, "t2d": SOME.t2d}
    manifest = DrafterManifest(
        kind="early_exit", target=TargetRecord(name="tiny"), kind_config=recipe.kind_config()
    )
    return write_drafter(
        folder, recipe.written(torch.bfloat16), manifest, tensors={DRAFT_VOCAB_NAME: vocab}
    )


def test_the_fitted_start_overlaps_more_than_the_bare_head(target, module):
    examples = examples_of(module)
    bare, fitted = (recipe_of(target, module, fit_lens=fit) for fit in (False, True))
    fitted.put_start(fitted.solve_start(examples[:40]))
    assert bare.solve_start(examples) == {}
    assert overlap_of(fitted, examples[40:]) > overlap_of(bare, examples[40:])


def test_two_steps_move_every_parameter_of_the_adapter_and_nothing_of_the_target(target, module):
    recipe, examples = recipe_of(target, module), examples_of(module, 20)
    before = {k: v.clone() for k, v in recipe.module.state_dict().items()}
    target_before = {k: v.clone() for k, v in module.state_dict().items()}
    optimizer = torch.optim.SGD(recipe.module.parameters(), lr=0.5)
    terms = recipe.objective(LossConfig())
    first = overlap_of(recipe, examples)
    for number in range(2):  # the MLP's inputs move once its zero output matrix has
        batch = BatchStream(examples, max_tokens=10**6, seed=0)(number)
        optimizer.zero_grad()
        terms(recipe.module, batch).loss_sum.div(batch.num_tokens).backward()
        optimizer.step()
    assert not any(torch.equal(before[k], v) for k, v in recipe.module.state_dict().items())
    assert all(torch.equal(target_before[k], v) for k, v in module.state_dict().items())
    assert overlap_of(recipe, examples) > first


def test_a_reduced_head_is_those_rows_of_the_targets(target, module):
    ids = torch.tensor([3, 9, 60])
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    found = ReducedHead(target.model, ids)(hidden)
    torch.testing.assert_close(found, hidden @ module.lm_head.weight[ids].T, rtol=1e-5, atol=1e-5)


def test_the_folder_drafts_as_the_module_and_the_text_stays_the_targets(target, module, tmp_path):
    temperature = 0.0 if isinstance(target.model, HFModel) else 1.0
    recipe = recipe_of(target, module)
    recipe.put_start(recipe.solve_start(examples_of(module)))
    folder = written(recipe, tmp_path / "drafter", target)
    assert set(load_file(folder / ADAPTER_NAME)) == set(recipe.module.state_dict())
    drafters = [recipe.drafter(engine=Engine.auto), load_drafter(folder, target)]
    runs = [
        SpeculativeDecoder(target, drafter, num_draft_tokens=3).generate(
            PROMPTS, max_new_tokens=24, temperature=temperature, seed=5
        )
        for drafter in drafters
    ]
    assert runs[0].token_ids == runs[1].token_ids
    assert runs[0].stats == runs[1].stats
    assert runs[0].stats.num_accepted > 0
    proposed = {token for row in runs[1].token_ids for token in row}
    assert proposed - set(
        SOME.token_ids.tolist()
    )  # what the draft can not say, the target still can
    if temperature == 0:
        plain = SpeculativeDecoder(target).generate(PROMPTS, max_new_tokens=24)
        assert runs[1].token_ids == plain.token_ids


def test_an_adapter_of_another_size_is_refused(target, module, tmp_path):
    folder = written(recipe_of(target, module, mlp_size=8), tmp_path / "drafter", target)
    tensors = load_file(folder / ADAPTER_NAME)
    save_file({k: v for k, v in tensors.items() if k != "down.weight"}, folder / ADAPTER_NAME)
    with pytest.raises(ValueError, match="does not fit this target"):
        load_drafter(folder, target)
    assert read_manifest(folder).kind_config["exit_layer"] == 2


def test_an_exit_behind_the_last_layer_is_refused(target, module):
    with pytest.raises(ValueError, match="the target has 4 layers"):
        make(EarlyExitSettings(exit_layer=4), TargetParts(target, module, SOME, None))
