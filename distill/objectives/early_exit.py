"""Self-speculation that is trained: an adapter between the target's first layers and its head.

The target is not touched: its first layers run as they decode, and what is trained is a norm and a
small network in front of the frozen head (`specdec_runtime.exit_adapter`). The layers' keys and
values are the ones that verification needs anyway, so that drafting costs the adapter and the head.

Shapes: B rows, S tokens, N loss positions, D hidden size, n draft vocabulary.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.batches import Batch, BatchStream, Example
from distill.chunked_head import head_loss
from distill.lens import LENS_POSITIONS, fit_lens
from distill.losses import LossConfig, LossName
from distill.objective import Objective, Terms, terms_of
from distill.recipe import DraftSettings, TargetParts
from distill.weighing import weigh_texts
from specdec_runtime.drafters.early_exit import EarlyExitDrafter
from specdec_runtime.engines import Engine
from specdec_runtime.exit_adapter import ExitAdapter, load_exit_adapter
from specdec_runtime.formats import read_draft_vocab, read_manifest

LENS_NAME = "lens.weight"


@dataclass(kw_only=True)
class EarlyExitSettings(DraftSettings):
    """draft.* of an early exit.

    exit_layer: how many of the target's layers draft.
    mlp_size: of the adapter's network; 0 = its linear map alone, null = the hidden size.
    fit_lens: start from the fitted linear map instead of the residual itself.
    model: folder of an early exit of this layer and size to go on from; its draft vocabulary is taken
        over. null = a new one.
    """

    kind: str = "early_exit"
    exit_layer: int = 3
    mlp_size: int | None = None
    fit_lens: bool = True
    model: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exit_layer < 1:
            raise ValueError(f"draft.exit_layer must be at least 1, got {self.exit_layer}")
        if self.mlp_size is not None and self.mlp_size < 0:
            raise ValueError(f"draft.mlp_size must be 0 or more, got {self.mlp_size}")

    def fixed_tokens(self, target_tokenizer: Any) -> Tensor | None:
        return None if self.model is None else read_draft_vocab(self.model)


SETTINGS = EarlyExitSettings


def make(settings: EarlyExitSettings, parts: TargetParts) -> "EarlyExitRecipe":
    """An adapter for this target.

    Raises:
        ValueError: if the target has no more layers than draft.
    """
    model = parts.target.model
    if settings.exit_layer >= model.num_layers:
        raise ValueError(
            f"draft.exit_layer is {settings.exit_layer}, expected 1 to {model.num_layers - 1}: "
            f"the target has {model.num_layers} layers"
        )
    size = model.hidden_size
    mlp_size = size if settings.mlp_size is None else settings.mlp_size
    eps = getattr(model.config, "rms_norm_eps", 1e-6)
    adapter = ExitAdapter(size, mlp_size=mlp_size, norm_eps=eps)
    _take_norm(adapter, parts.module)
    return EarlyExitRecipe(settings, parts, adapter, mlp_size)


class EarlyExitRecipe:
    """An exit adapter under training; see `distill.recipe.Recipe`."""

    feature_layers: tuple[int, ...] = ()
    tokenizer: Any = None
    scored_settings: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        settings: EarlyExitSettings,
        parts: TargetParts,
        adapter: ExitAdapter,
        mlp_size: int,
    ) -> None:
        self.module = adapter
        self._settings, self._parts, self._mlp_size = settings, parts, mlp_size

    def solve_start(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        if self._settings.model is not None:
            return self._trained_before(self._settings.model)
        if not self._settings.fit_lens:
            return {}
        lens = fit_lens(self._state_pairs(examples))
        return {LENS_NAME: lens.T}

    def _trained_before(self, folder: str) -> dict[str, Tensor]:
        """The weights of a trained adapter.

        Raises:
            ValueError: if it is another kind of drafter, or of another layer or size.
        """
        given, exit_layer = read_manifest(folder), self._settings.exit_layer
        if (given.kind, given.kind_config.get("exit_layer")) != ("early_exit", exit_layer):
            raise ValueError(
                f"draft.model={folder} is a {given.kind} drafter {given.kind_config}, expected an "
                f"early_exit of layer {exit_layer}: give draft.* the settings that it was "
                "trained with"
            )
        size, device = self._parts.target.model.hidden_size, torch.device("cpu")
        adapter = load_exit_adapter(
            folder, size, mlp_size=self._mlp_size, norm_eps=self.module.norm_eps, device=device
        )
        return dict(adapter.state_dict())

    def put_start(self, computed: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in computed.items():
                self.module.get_parameter(name).copy_(tensor)

    def objective(self, loss: LossConfig) -> Objective:
        if loss.selection.reference is not None:
            raise ValueError(
                "draft.kind=early_exit trains all positions: loss.selection is for causal_lm drafters"
            )
        if loss.name is LossName.expected_length and self._settings.model is None:
            raise ValueError(
                "loss.name=expected_length starts from a trained drafter only: train with another "
                "loss first and give that folder with draft=early_exit draft.model=FOLDER"
            )
        device = next(self.module.parameters()).device
        head = self._parts.head.to(device)

        def terms(module: nn.Module, batch: Batch) -> Terms:
            hidden = module(self.residuals(batch))
            weigh = weigh_texts(loss, batch.positions, given=batch.weights)
            sums = head_loss(
                hidden, head.kept_weight, head, batch.rows, batch.labels, loss, weigh=weigh
            )
            return terms_of(sums, batch.num_tokens)

        return terms

    def residuals(self, batch: Batch) -> Tensor:
        """[N, D] the target's own states after the layers that draft, at the loss positions."""
        model, exit_layer = self._parts.target.model, self._settings.exit_layer
        ids = batch.token_ids.to(model.device)
        output = model.forward(
            ids,
            model.new_cache(*ids.shape),
            layers=(0, exit_layer),
            hidden_layers=(exit_layer,),
            logits=False,
        )
        device = batch.positions.device
        return output.hidden[exit_layer].to(device).flatten(0, 1)[batch.positions]

    def prepared(self, batch: Batch) -> Batch:
        return batch

    def snapshot(self) -> "EarlyExitRecipe":
        copied = copy.copy(self)
        copied.module = copy.deepcopy(self.module)
        return copied

    def drafter(self, *, engine: Engine) -> EarlyExitDrafter:
        vocab = self._parts.vocab
        return EarlyExitDrafter(
            self._parts.target.model,
            exit_layer=self._settings.exit_layer,
            adapter=self.module,
            draft_vocab=None if vocab.is_full else vocab.token_ids,
        )

    def written(self, dtype: torch.dtype) -> ExitAdapter:
        """In float32 whatever the target's dtype: the adapter is small, and drafts as it trained."""
        return copy.deepcopy(self.module).float()

    def writing_report(self, written: ExitAdapter) -> dict[str, float]:
        return {}

    def kind_config(self) -> dict[str, Any]:
        return {
            "exit_layer": self._settings.exit_layer,
            "mlp_size": self._mlp_size,
            "norm_eps": self.module.norm_eps,
        }

    def compile(self) -> None:
        self.module.compile(dynamic=True)

    @torch.no_grad()
    def _state_pairs(self, examples: Sequence[Example]) -> Iterator[tuple[Tensor, Tensor]]:
        stream = BatchStream(examples, max_tokens=2048, seed=0)
        device = next(self.module.parameters()).device
        taken = number = 0
        while taken < LENS_POSITIONS and stream.epoch_of(number) == 0:
            batch = stream(number).to(device)
            normed = self.module.normed(self.residuals(batch))
            yield normed, batch.target_states.float()
            taken, number = taken + batch.num_tokens, number + 1


@torch.no_grad()
def _take_norm(adapter: ExitAdapter, target: PreTrainedModel) -> None:
    """Starts from the target's final norm where it is one of the same kind."""
    norm = getattr(target.base_model, "norm", None)
    weight = getattr(norm, "weight", None)
    if isinstance(weight, Tensor) and weight.shape == adapter.norm.shape:
        adapter.norm.copy_(weight.float())
