"""No training step waits for a device: nothing in an objective, of any kind of drafter, asks for it."""

import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from distill.batches import Batch, BatchStream, collate
from distill.causal_lm_modules import layers_of_target
from distill.losses import LossConfig, LossName
from distill.objective import Objective
from distill.objectives import causal_lm, early_exit
from distill.objectives.causal_lm import freeze_embeddings
from distill.position_weights import WeightScheme, WeightsConfig
from distill.recipe import Recipe, trained_kinds
from specdec_runtime.hf_model import HFModel
from specdec_runtime.target import Target
from tests import test_cross_tokenizer_objective as cross
from tests import test_eagle3_objective, test_early_exit_kind, test_parallel_objective
from tests.conftest import tiny_llama
from tests.test_causal_lm_objective import _examples, _head


class Asked(TorchDispatchMode):
    """Notes operations that a host waits for: values it needs, sizes that depend on values, and
    tensors made of its own numbers, whose copy to a device is waited for.

    One is not ours: transformers looks once a pass whether sequences are packed (not if compiled).
    """

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
    COPYING = ("lift_fresh",)
    METHODS = ("tolist", "numpy", "cpu")  # which on a CPU are no operations

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Self:
        for name in self.METHODS:
            self._patch.setattr(torch.Tensor, name, self._noted(name, getattr(torch.Tensor, name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def _noted(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.names.append(name)
            return plain(*arguments, **named)

        return call

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
        if name in self.WAITING + self.COPYING or by_mask:
            stack = traceback.extract_stack()
            if not any(frame.name == "find_packed_sequence_indices" for frame in stack):
                self.names.append(name)
        return func(*args, **(kwargs or {}))


Setting = tuple[Objective, nn.Module, Batch]


def of_causal_lm(loss: LossConfig, device: str = "cpu") -> Setting:
    target = tiny_llama(0)
    module = layers_of_target(target, [0])
    freeze_embeddings(module)
    batch = BatchStream(_examples(target), max_tokens=64, seed=0)(0)
    module.to(device)
    return causal_lm.objective(module, _head(target).to(device), loss), module, batch


def of_early_exit(loss: LossConfig, device: str, monkeypatch: pytest.MonkeyPatch) -> Setting:
    module = tiny_llama(0, num_layers=4)
    recipe = test_early_exit_kind.recipe_of(Target(model=HFModel(module)), module)
    batch = collate(test_early_exit_kind.examples_of(module, 3))
    residuals = recipe.residuals(batch).to(device)  # a pass of the target, which is the runtime's
    monkeypatch.setattr(early_exit.EarlyExitRecipe, "residuals", lambda self, batch: residuals)
    recipe.module.to(device)
    return recipe.objective(loss), recipe.module, batch


def of_states(tests: Any, loss: LossConfig, device: str, folder: Path) -> Setting:
    target = Target(model=HFModel(tiny_llama(0, num_layers=4)), eos_token_ids=(2,))
    recipe = tests.recipe_for(target)
    batch = collate(test_eagle3_objective.written_by(target, 3, folder, length=8))
    recipe.module.to(device)
    return recipe.objective(loss), recipe.module, batch


def of_cross_tokenizer(loss: LossConfig, device: str, folder: Path) -> Setting:
    target = Target(
        model=cross.tiny(cross.TARGET_TOKENIZER, 0),
        tokenizer=cross.TARGET_TOKENIZER,
        real_vocab_size=len(cross.TARGET_TOKENIZER),
    )
    cross.tiny(cross.DRAFT_TOKENIZER, 1).module.save_pretrained(folder)
    cross.DRAFT_TOKENIZER.save_pretrained(folder)
    recipe: Recipe = cross.recipe_of(target, str(folder))
    batch = recipe.prepared(cross.batch_of(target, [cross.target_ids(cross.TEXT)]))
    recipe.module.to(device)
    return recipe.objective(loss), recipe.module, batch


MAKERS: dict[str, Callable[..., Setting]] = {
    "causal_lm": lambda loss, on, folder, patch: of_causal_lm(loss, on),
    "early_exit": lambda loss, on, folder, patch: of_early_exit(loss, on, patch),
    "eagle3": lambda loss, on, folder, patch: of_states(test_eagle3_objective, loss, on, folder),
    "parallel": lambda loss, on, folder, patch: of_states(
        test_parallel_objective, loss, on, folder
    ),
    "cross_tokenizer": lambda loss, on, folder, patch: of_cross_tokenizer(loss, on, folder),
}


def asked_by(setting: Setting) -> list[str]:
    """What a step asks for, behind a first one: tables are copied to the device once."""
    objective, module, batch = setting
    module.train()
    objective(module, batch)
    with Asked() as asked:
        objective(module, batch).loss_sum.backward()
    return asked.names


@pytest.mark.parametrize("kind", trained_kinds())
def test_the_objective_of_every_kind_asks_the_device_for_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert asked_by(MAKERS[kind](LossConfig(), "cpu", tmp_path, monkeypatch)) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", trained_kinds())
def test_a_gpu_is_never_waited_for(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same, as CUDA itself sees it; what transformers asks (see `Asked`) is left out."""
    objective, module, batch = MAKERS[kind](LossConfig(), "cuda", tmp_path, monkeypatch)
    batch = batch.to("cuda")
    objective(module.train(), batch)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            objective(module, batch).loss_sum.backward()
            ours = [one for one in caught if "transformers" not in one.filename]
            batch.labels.sum().item()  # the control
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ours == []
    assert len(caught) > 0


@pytest.mark.parametrize("loss", [loss for loss in LossName if loss is not LossName.lk_hybrid])
def test_every_loss_asks_for_nothing(loss: LossName):
    assert asked_by(of_causal_lm(LossConfig(name=loss))) == []


@pytest.mark.parametrize("scheme", list(WeightScheme))
def test_every_weighing_asks_for_nothing(scheme: WeightScheme):
    config = LossConfig(weights=WeightsConfig(scheme=scheme))
    assert asked_by(of_causal_lm(config)) == []


def test_what_asks_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The control: a drafter with another tokenizer reads token ids on the host unless the loader did."""
    objective, module, batch = of_cross_tokenizer(LossConfig(), "cpu", tmp_path)
    batch.draft_rows = None
    assert {"tolist", "lift_fresh"} <= set(asked_by((objective, module, batch)))
    with Asked() as asked:
        int(batch.labels.sum())
        batch.labels[batch.labels > 3]
        batch.labels.cpu()
    assert asked.names == ["_local_scalar_dense", "index", "cpu"]
