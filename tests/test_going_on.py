"""Drafters that go on from a trained folder, and the loss that needs one."""

import pytest
import torch

from distill.batches import collate
from distill.draft_vocab import full_vocab
from distill.losses import LossConfig, LossName
from distill.objectives import eagle3, early_exit, parallel
from distill.recipe import Recipe
from specdec_runtime.formats import (
    DRAFT_VOCAB_NAME,
    DrafterManifest,
    TargetRecord,
    write_drafter,
)
from specdec_runtime.hf_model import HFModel
from specdec_runtime.target import Target
from tests.conftest import tiny_llama
from tests.test_eagle3_objective import KEPT, parts_of, written_by

KINDS = {"eagle3": eagle3, "parallel": parallel, "early_exit": early_exit}
LENGTH = LossConfig(name=LossName.expected_length)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(model=HFModel(tiny_llama(0, num_layers=4)), eos_token_ids=(2,))


@pytest.fixture(scope="module")
def examples(target, tmp_path_factory):
    return written_by(target, 3, tmp_path_factory.mktemp("texts"), length=8)


def recipe_of(kind: str, target: Target, vocab=KEPT, **settings) -> Recipe:
    module = KINDS[kind]
    return module.make(module.SETTINGS(**settings), parts_of(target, vocab))


@pytest.fixture(scope="module", params=list(KINDS))
def trained(request, target, tmp_path_factory) -> tuple[Recipe, str]:
    """A drafter with weights of its own, and its folder."""
    torch.manual_seed(5)
    recipe = recipe_of(request.param, target)
    for weight in recipe.module.parameters():
        if weight.requires_grad:
            weight.data += 0.02 * torch.randn(weight.shape)
    manifest = DrafterManifest(
        kind=request.param, target=TargetRecord(name="tiny"), kind_config=recipe.kind_config()
    )
    folder = write_drafter(
        tmp_path_factory.mktemp("trained") / "drafter",
        recipe.written(torch.float32),
        manifest,
        tensors={DRAFT_VOCAB_NAME: {"d2t": KEPT.d2t, "t2d": KEPT.t2d}},
    )
    return recipe, str(folder)


def test_a_new_run_starts_where_the_folder_ended(trained, target):
    before, folder = trained
    kind = before._settings.kind
    recipe = recipe_of(kind, target, model=folder)
    recipe.put_start(recipe.solve_start([]))
    for name, weight in before.module.state_dict().items():
        assert torch.equal(recipe.module.state_dict()[name], weight), name
    settings = KINDS[kind].SETTINGS(model=folder)
    assert torch.equal(settings.fixed_tokens(None), KEPT.token_ids)


def test_the_expected_length_goes_on_from_there_and_grows(trained, target, examples):
    before, folder = trained
    kind = before._settings.kind
    with pytest.raises(ValueError, match=rf"draft={kind} draft.model=FOLDER"):
        before.objective(LENGTH)
    recipe = recipe_of(kind, target, model=folder)
    recipe.put_start(recipe.solve_start([]))
    terms, batch = recipe.objective(LENGTH), collate(examples)
    trained_weights = [p for p in recipe.module.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained_weights, lr=3e-3)
    values = []
    for _ in range(4):
        optimizer.zero_grad()
        found = terms(recipe.module, batch)
        values.append(float(found.loss_sum.detach()) / found.num_tokens)
        (found.loss_sum / found.num_tokens).backward()
        optimizer.step()
    assert values[-1] < values[0]


def test_a_folder_of_another_form_is_named(trained, target):
    before, folder = trained
    kind = before._settings.kind
    changed = {"exit_layer": 1} if kind == "early_exit" else {"layer_ids": [1, 3]}
    with pytest.raises(ValueError, match="settings that it was trained with"):
        recipe_of(kind, target, model=folder, **changed).solve_start([])
    if kind != "early_exit":  # which has no head of its own
        with pytest.raises(ValueError, match=r"its lm_head.weight is \(51, 32\)"):
            recipe_of(kind, target, full_vocab(64), model=folder).solve_start([])
