"""The stages of a run, as far as they need no run: what comes before the first step, and names."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec_runtime.hf_model import HFModel
from specdec_runtime.target import Target
from tests.conftest import tiny_llama
from tests.test_wiring import ALL_KINDS, recipe_of
from train import stages
from train.checkpoint import TrainState
from train.sharding import trained_weights


def test_saving_is_tried_before_the_first_step(monkeypatch: pytest.MonkeyPatch):
    called = []

    def full(*given: Any, **named: Any) -> None:
        called.append("save")
        raise OSError("No space left on device")

    monkeypatch.setattr(stages, "resume", lambda *given, **named: None)
    monkeypatch.setattr(stages, "_first_state", lambda *given: TrainState(max_steps=3))
    monkeypatch.setattr(stages, "save", full)
    monkeypatch.setattr(stages, "train", lambda *given, **named: called.append("train"))
    log = SimpleNamespace(continue_after=lambda step: None)
    config = SimpleNamespace(on_policy=SimpleNamespace(refresh_every=1))
    device = SimpleNamespace(device=torch.device("cpu"))
    job = SimpleNamespace(config=config, log=log, accelerator=device, checkpoints=None, say=str)
    training = SimpleNamespace(parts=None, identity={}, proposer=None, writer=None)
    with pytest.raises(OSError, match="No space left"):
        stages.train_drafter(job, None, training)  # type: ignore[arg-type]
    assert called == ["save"]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_what_is_compiled_is_saved_and_written_under_the_same_names(kind: str):
    """Case I8, of checkpoints and of the folder to serve; nothing is compiled before it is called."""
    module = tiny_llama(0, num_layers=3)
    recipe = recipe_of(kind, Target(model=HFModel(module), real_vocab_size=64), module)

    def names() -> Iterator[str]:
        yield from trained_weights(recipe.module)
        yield from recipe.written(torch.float32).state_dict()

    before = list(names())
    recipe.compile()
    assert list(names()) == before
    assert not any("_orig_mod" in name or name.startswith("module.") for name in before)
