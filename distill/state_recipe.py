"""What drafters on the target's own states share in training: `eagle3` and `parallel`."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from distill.batches import Batch, Example
from distill.losses import LossConfig, LossName
from distill.objective import Objective
from distill.recipe import DraftSettings, TargetParts, as_written
from distill.signals import TargetHead
from specdec_runtime.formats import read_draft_vocab

EMBEDDINGS = "model.embed_tokens."  # the target's own, in nothing that is kept


@dataclass(kw_only=True)
class StateSettings(DraftSettings):
    """draft.* of drafters on the target's own states.

    layer_ids: k of the target's residuals after k layers that the drafter reads; null = the serving
        engines' default, a low, a middle and a high one.
    context_heads: attention heads that the solved start leaves free; they learn where to look.
    intermediate_size: of its MLP; null = the target's.
    steps: drafted tokens that training scores from every position.
    step_decay: weight of each step's loss relative to the one before.
    solve_start: start from the solved linear model instead of random numbers.
    model: folder of a drafter of this kind to go on from, trained with these settings; its draft
        vocabulary is taken over. null = a new one.
    """

    layer_ids: list[int] | None = None
    context_heads: int = 2
    intermediate_size: int | None = None
    steps: int = 2
    step_decay: float = 0.8
    solve_start: bool = True
    model: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_at_least(steps=1, context_heads=0)
        if not 0 < self.step_decay <= 1:
            raise ValueError(f"draft.step_decay must be in (0, 1], got {self.step_decay}")

    def _require_at_least(self, **lowest: int) -> None:
        for name, least in lowest.items():
            if getattr(self, name) < least:
                raise ValueError(
                    f"draft.{name} must be at least {least}, got {getattr(self, name)}"
                )

    def feature_layers(self, num_layers: int) -> tuple[int, ...]:
        return tuple(self.layer_ids or default_layer_ids(num_layers))

    def fixed_tokens(self, target_tokenizer: Any) -> Tensor | None:
        return None if self.model is None else read_draft_vocab(self.model)


def default_layer_ids(num_layers: int) -> list[int]:
    """2, n // 2, n - 3 as the serving engines have it; for a shallow target what there is of it."""
    return sorted({min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0)})


def head_dim_of(target: PretrainedConfig) -> int:
    """The size of the target's attention heads, which the drafter's have too."""
    return getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads


@torch.no_grad()
def take_target_ends(network: Any, parts: TargetParts) -> None:
    """Gives a network the target's embeddings and the rows of its head, and freezes them."""
    network.model.embed_tokens.weight.copy_(parts.module.get_input_embeddings().weight)
    network.lm_head.weight.copy_(parts.head.kept_weight)
    network.model.embed_tokens.requires_grad_(False)
    network.lm_head.requires_grad_(False)


class StateRecipe(ABC):
    """A drafter under training that reads layers of the target; see `distill.recipe.Recipe`.

    A kind says how its start is solved, how its folder is loaded, what its objective is, what runs it
    and what compiles.
    """

    tokenizer: Any = None
    scored_settings: Mapping[str, Any] = MappingProxyType({})
    module: Any  # the kind's network
    _settings: Any  # the kind's `StateSettings`

    def __init__(self, settings: StateSettings, parts: TargetParts, module: nn.Module) -> None:
        self.module = module
        self.feature_layers = tuple(self.module.config.eagle_aux_hidden_state_layer_ids)
        self._settings = settings
        self._parts = parts

    @abstractmethod
    def _solve(self, examples: Sequence[Example]) -> None:
        """Fits the module to the examples, in place."""

    @abstractmethod
    def _load(self, folder: str) -> Any:
        """The network of a folder of this kind."""

    @abstractmethod
    def _objective(self, target_head: TargetHead, loss: LossConfig) -> Objective:
        """What is minimised; the head is on the module's device."""

    @property
    def _draft_rows(self) -> Tensor | None:
        """The tokens that it can propose; None = all."""
        vocab = self._parts.vocab
        return None if vocab.is_full else vocab.token_ids

    def solve_start(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        if self._settings.model is not None:
            return self._trained_before(self._settings.model)
        if not self._settings.solve_start:
            return {}
        self._solve(examples)
        return self._kept(self.module)

    def _trained_before(self, folder: str) -> dict[str, Tensor]:
        """The weights of a trained drafter.

        Raises:
            ValueError: if it is of another form than this one.
        """
        network = self._load(folder)
        forms = []
        for one in (self.module, network):
            shapes = {name: tuple(tensor.shape) for name, tensor in self._kept(one).items()}
            read = tuple(one.config.eagle_aux_hidden_state_layer_ids)
            norms = getattr(one.config, "norm_output", None)
            forms.append(shapes | {"layers of the target": read, "norm_output": norms})
        own, given = forms
        if differing := [name for name in own | given if own.get(name) != given.get(name)]:
            name = differing[0]
            raise ValueError(
                f"draft.model={folder} is of another form: its {name} is {given.get(name)}, that of "
                f"the drafter {own.get(name)}; give draft.* the settings that it was trained with"
            )
        return {name: tensor.float() for name, tensor in self._kept(network).items()}

    def _kept(self, network: nn.Module) -> dict[str, Tensor]:
        return {
            name: tensor.detach()
            for name, tensor in network.state_dict().items()
            if not name.startswith(EMBEDDINGS)
        }

    def put_start(self, computed: dict[str, Tensor]) -> None:
        if computed:
            self.module.load_state_dict(computed, strict=False)

    def objective(self, loss: LossConfig) -> Objective:
        kind = self._settings.kind
        if loss.selection.reference is not None:
            raise ValueError(
                f"draft.kind={kind} trains all positions of every drafted token: loss.selection is "
                "for causal_lm drafters"
            )
        if loss.name is LossName.expected_length and self._settings.model is None:
            raise ValueError(
                "loss.name=expected_length starts from a trained drafter only: train with another "
                f"loss first and give that folder with draft={kind} draft.model=FOLDER"
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
