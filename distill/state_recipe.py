"""What the recipes of drafters on the target's own states share: `eagle3` and `parallel`."""

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from distill.batches import Batch, Example
from distill.losses import LossConfig, LossName
from distill.objective import Objective
from distill.recipe import DraftSettings, TargetParts, as_written
from distill.signals import TargetHead


class StateRecipe:
    """A drafter under training that reads layers of the target; see `distill.recipe.Recipe`.

    A kind says how its start is solved, what its objective is, what runs it and what compiles.
    """

    tokenizer: Any = None
    scored_settings: Mapping[str, Any] = MappingProxyType({})
    module: Any  # the kind's network
    _settings: Any  # the kind's `DraftSettings`

    def __init__(self, settings: DraftSettings, parts: TargetParts, module: nn.Module) -> None:
        self.module = module
        self.feature_layers = tuple(self.module.config.eagle_aux_hidden_state_layer_ids)
        self._settings = settings
        self._parts = parts

    def _solve(self, examples: Sequence[Example]) -> None:
        """Fits the module to the examples, in place."""
        raise NotImplementedError

    def _objective(self, target_head: TargetHead, loss: LossConfig) -> Objective:
        """What is minimised; the head is on the module's device."""
        raise NotImplementedError

    @property
    def _draft_rows(self) -> Tensor | None:
        """The tokens that it can propose; None = all."""
        vocab = self._parts.vocab
        return None if vocab.is_full else vocab.token_ids

    def solve_start(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        if not self._settings.solve_start:
            return {}
        self._solve(examples)
        return {
            name: tensor.detach()
            for name, tensor in self.module.state_dict().items()
            if not name.startswith("model.embed_tokens.")
        }

    def put_start(self, computed: dict[str, Tensor]) -> None:
        if computed:
            self.module.load_state_dict(computed, strict=False)

    def objective(self, loss: LossConfig) -> Objective:
        if loss.selection.reference is not None or loss.name is LossName.expected_length:
            raise ValueError(
                f"draft.kind={self._settings.kind} trains all positions of every drafted token: "
                "loss.selection and loss.name=expected_length are for causal_lm drafters"
            )
        device = next(self.module.parameters()).device
        return self._objective(self._parts.head.to(device), loss)

    def prepared(self, batch: Batch) -> Batch:
        return batch

    def snapshot(self) -> Self:
        return type(self)(self._settings, self._parts, copy.deepcopy(self.module))

    def written(self, dtype: torch.dtype) -> Any:
        return as_written(copy.deepcopy(self.module), dtype, self._settings)

    def writing_report(self, written: Any) -> dict[str, float]:
        return {}

    def kind_config(self) -> dict[str, Any]:
        return {}
