"""What a drafter kind brings to training: how it is made, started, trained, run and written.

`objectives/<kind>.py` holds, under the name of the drafter kind in `specdec_runtime/drafters`:
- SETTINGS, a dataclass below `DraftSettings`: what `draft.*` may say for this kind;
- make(settings, parts) -> Recipe.

A trainer only sees these; adding a kind touches nothing else.
"""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill import objectives
from distill.batches import Batch, Example
from distill.draft_vocab import DraftVocab
from distill.losses import LossConfig
from distill.objective import Objective
from distill.signals import TargetHead
from specdec_runtime.draft import Drafter
from specdec_runtime.engines import Engine
from specdec_runtime.int8_grid import round_matrices
from specdec_runtime.target import Target


@dataclass(kw_only=True)
class DraftSettings:
    """draft.*, as far as all kinds share it.

    kind: of the drafter, a module of `distill.objectives`.
    draft_vocab_size: tokens that the drafter can propose; null = all.
    int8_weights: round the matrices of a bfloat16 folder so that int8 holds them too, which the C++
        engine then reads in half the time (specdec_runtime/int8_grid.py); false for GPUs, which gain
        nothing by it. An early_exit adapter stays in float32.
    """

    kind: str
    draft_vocab_size: int | None = 8192
    int8_weights: bool = True

    def __post_init__(self) -> None:
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ValueError(
                f"draft.draft_vocab_size must be at least 1 or null, got {self.draft_vocab_size}"
            )

    def feature_layers(self, num_layers: int) -> tuple[int, ...]:
        """Of a target with so many layers, those whose states the drafter reads: none, one a number
        k for the residual after k layers."""
        return ()

    def fixed_tokens(self, target_tokenizer: Any) -> Tensor | None:
        """[n] ascending target ids, where the kind itself decides what can be proposed; else None."""
        return None


@dataclass(frozen=True)
class TargetParts:
    """What a drafter is made from.

    Attributes:
        target: as it decodes; its model gives hidden states.
        module: the same target as a transformers module on the CPU, in its stored dtype.
        vocab: the tokens that the drafter can propose.
        head: the target's frozen head over them.
    """

    target: Target
    module: PreTrainedModel
    vocab: DraftVocab
    head: TargetHead


class RefreshableDrafter(Drafter, Protocol):
    """A drafter of the runtime around the module that is trained."""

    def refresh(self) -> None:
        """Take over the weights that the module has now; between `generate` calls only."""


class Recipe(Protocol):
    """One drafter under training."""

    module: nn.Module  # float32; what requires a gradient in it is trained, and nothing else
    feature_layers: tuple[int, ...]  # of the target's residuals that examples have to hold
    tokenizer: Any  # of the drafter, where it is another than the target's; else None
    # Of the runtime's drafter: with these it proposes what the objective scores.
    scored_settings: Mapping[str, Any]

    def solve_start(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """What is computed once, before the first step, by parameter name; may be empty."""

    def put_start(self, computed: dict[str, Tensor]) -> None:
        """Put that in place; a resumed run gets it from its folder."""

    def objective(self, loss: LossConfig) -> Objective:
        """What is minimised; the module is on its device by then."""

    def prepared(self, batch: Batch) -> Batch:
        """The batch with what the objective needs computed on the host; the loader's thread calls it."""

    def drafter(self, *, engine: Engine) -> RefreshableDrafter:
        """The runtime's drafter around the module."""

    def snapshot(self) -> "Recipe":
        """The same with a copy of the module, which training does not change."""

    def written(self, dtype: torch.dtype) -> Any:
        """A copy to be saved, a module with `save_pretrained(folder)`; that under training stays."""

    def writing_report(self, written: Any) -> dict[str, float]:
        """What writing changed, for the folder's record; empty if nothing."""

    def kind_config(self) -> dict[str, Any]:
        """Settings that the kind's `load` in the runtime needs besides the folder."""

    def compile(self) -> None:
        """torch.compile what is trained, in place: no wrapper and no prefix in any key."""


def as_written(module: Any, dtype: torch.dtype, settings: DraftSettings) -> Any:
    """`module`, a copy of a transformers model under training, as its folder holds it: in place."""
    nn.Module.to(module, dtype=dtype)
    module.config.dtype = dtype  # the configuration says what the tensors are
    if settings.int8_weights and dtype is torch.bfloat16:
        round_matrices(module)
    return module


def trained_kinds() -> list[str]:
    """Names of the kinds that can be trained: the modules of `distill.objectives`."""
    return [module.name for module in pkgutil.iter_modules(objectives.__path__)]


def settings_of(kind: str) -> type[DraftSettings]:
    """The dataclass of `draft.*` for this kind."""
    return _module(kind).SETTINGS


def make_recipe(settings: DraftSettings, parts: TargetParts) -> Recipe:
    """The drafter that the settings describe, before its first step.

    Raises:
        ValueError: if it can not be made from this target.
    """
    return _module(settings.kind).make(settings, parts)


def _module(kind: str) -> Any:
    if kind not in trained_kinds():
        raise ValueError(f"draft.kind is {kind!r}, expected one of {', '.join(trained_kinds())}")
    return importlib.import_module(f"distill.objectives.{kind}")
