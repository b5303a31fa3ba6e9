"""How a standalone causal LM drafter is made, and what it is trained on.

By default it is made of the target's own parts: its embeddings, a few of its layers, its final norm,
and its head behind a fitted linear map (`lens.py`), so that it is of use before the first step.
Trained: the layers and the norm, or adapters on a stock model's layers, on the target's distribution
at every token of the target's own answers.

The first layers are the ones to take: they read what the embeddings say, while later ones expect
states that only the layers in between can make. Measured on SmolLM2-135M (overlap on held-out
answers before any training, layers with their lens): [0] .31, [0, 1] .33, [0, 1, 2] .34,
[0, 29] .26.

Shapes: B rows, S tokens, N loss positions, D hidden size, n draft vocabulary.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.adapters import LoraSettings, MergedDrafter, add_lora, merge_report, merged
from distill.batches import Batch, BatchStream, Example
from distill.causal_lm_modules import from_scratch, layers_of_target, stock_model
from distill.chunked_head import head_loss, position_overlaps
from distill.draft_vocab import DraftVocab
from distill.lens import LENS_POSITIONS, fit_lens, fold_lens
from distill.losses import LossConfig, LossName
from distill.objective import Objective, Terms, terms_of
from distill.recipe import DraftSettings, TargetParts, as_written
from distill.signals import TargetHead
from distill.weighing import weigh_texts
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.engines import Engine
from specdec_runtime.formats import read_draft_vocab
from specdec_runtime.loading import load_module

HEAD_NAME = "head"  # of the fitted head among what a start computes


class Source(Enum):
    """What a causal LM drafter is made from."""

    target = "target"  # layers of the target
    model = "model"  # a stock model, or a drafter trained before
    scratch = "scratch"  # new layers


@dataclass(kw_only=True)
class CausalLMSettings(DraftSettings):
    """draft.* of a causal LM.

    source: target, model or scratch.
    layers: of the target, in the order in which the drafter runs them (source=target).
    fit_head: start from the fitted linear map instead of the target's bare head (source=target).
    model: hub id or folder with the target's tokenizer (source=model).
    num_layers, hidden_size: of new layers (source=scratch); hidden_size null = the target's, with
        its frozen embeddings and head, else those are new and trained too.
    train_embeddings: train embeddings and head as well.
    lora: adapters on the layers instead of training these.
    """

    kind: str = "causal_lm"
    source: Source = Source.target
    layers: list[int] = field(default_factory=lambda: [0, 1])
    fit_head: bool = True
    model: str | None = None
    num_layers: int = 2
    hidden_size: int | None = None
    train_embeddings: bool = False
    lora: LoraSettings = field(default_factory=LoraSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layers or min(self.layers) < 0:
            raise ValueError(
                f"draft.layers must name at least one layer of the target, from 0, got "
                f"{list(self.layers)}"
            )
        if (self.source is Source.model) != (self.model is not None):
            raise ValueError(
                f"draft.source={self.source.value} and draft.model={self.model} do not go together: "
                "source=model needs a model, and only that"
            )
        for name in ("num_layers", "hidden_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"draft.{name} must be at least 1, got {value}")
        if self.lora.rank and (self.source is Source.scratch or self.train_embeddings):
            raise ValueError(
                "draft.lora.rank adapts given weights: leave it 0 with source=scratch and with "
                "train_embeddings"
            )


SETTINGS = CausalLMSettings


def make(settings: CausalLMSettings, parts: TargetParts) -> "CausalLMRecipe":
    """The drafter that the settings describe, and what of it is trained."""
    if settings.source is Source.model:
        assert settings.model is not None
        module = stock_model(settings.model, parts.target)
    elif settings.source is Source.scratch:
        module = from_scratch(
            parts.module, num_layers=settings.num_layers, hidden_size=settings.hidden_size
        )
    else:
        module = layers_of_target(parts.module, settings.layers)
    is_new = settings.source is Source.scratch and settings.hidden_size is not None
    if settings.lora.rank:
        add_lora(module, settings.lora)
    elif not (settings.train_embeddings or is_new):
        freeze_embeddings(module)
    return CausalLMRecipe(settings, parts, module)


def freeze_embeddings(module: PreTrainedModel) -> None:
    """Embeddings and head stay as they are."""
    module.get_input_embeddings().requires_grad_(False)
    module.get_output_embeddings().requires_grad_(False)


class CausalLMRecipe:
    """A causal LM under training; see `distill.recipe.Recipe`."""

    feature_layers: tuple[int, ...] = ()
    tokenizer: Any = None
    scored_settings: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self, settings: CausalLMSettings, parts: TargetParts, module: PreTrainedModel
    ) -> None:
        self.module = module
        self._settings = settings
        self._vocab, self._head = parts.vocab, parts.head

    def solve_start(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        if self._settings.source is not Source.target or not self._settings.fit_head:
            return {}
        fit_head(self.module, examples)
        return {HEAD_NAME: self.module.get_output_embeddings().weight.detach()}

    def put_start(self, computed: dict[str, Tensor]) -> None:
        if HEAD_NAME in computed:
            head = self.module.get_output_embeddings()
            trained = head.weight.requires_grad
            head.weight = nn.Parameter(computed[HEAD_NAME], requires_grad=trained)
            self.module.config.tie_word_embeddings = False

    def objective(self, loss: LossConfig) -> Objective:
        if loss.name is LossName.expected_length and self._settings.source is not Source.model:
            raise ValueError(
                "loss.name=expected_length starts from a trained drafter only: train with another "
                "loss first and give that folder with draft.source=model draft.model=FOLDER"
            )
        device = next(self.module.parameters()).device
        head = self._head.to(device)
        reference = None
        if loss.selection.reference is not None:
            reference = reference_of(loss.selection.reference, head, loss, device)
        return objective(self.module, head, loss, reference=reference)

    def prepared(self, batch: Batch) -> Batch:
        return batch

    def snapshot(self) -> "CausalLMRecipe":
        copied = copy.copy(self)
        copied.module = copy.deepcopy(self.module)
        return copied

    def drafter(self, *, engine: Engine) -> CausalLMDrafter:
        rows = None if self._vocab.is_full else self._vocab.token_ids
        if not self._settings.lora.rank:
            return CausalLMDrafter.from_module(self.module, draft_vocab=rows, engine=engine)
        drafter = MergedDrafter.from_module(merged(self.module), draft_vocab=rows, engine=engine)
        assert isinstance(drafter, MergedDrafter)
        drafter.adapted = self.module
        return drafter

    def written(self, dtype: torch.dtype) -> PreTrainedModel:
        written = merged(self.module) if self._settings.lora.rank else copy.deepcopy(self.module)
        return as_written(written, dtype, self._settings)

    def writing_report(self, written: PreTrainedModel) -> dict[str, float]:
        return merge_report(self.module, written) if self._settings.lora.rank else {}

    def kind_config(self) -> dict[str, Any]:
        return {}

    def compile(self) -> None:
        getattr(self.module, self.module.base_model_prefix).compile(dynamic=True)


def fit_head(
    module: PreTrainedModel, examples: Sequence[Example], *, max_positions: int = LENS_POSITIONS
) -> None:
    """Fits the drafter's head to the target's states on the examples, in place (see `lens.py`)."""
    fold_lens(module, fit_lens(_state_pairs(module, examples, max_positions)))


ReferenceOverlap = Callable[[Batch], Tensor]  # batch -> [N]


def objective(
    module: PreTrainedModel,
    target_head: TargetHead,
    config: LossConfig,
    *,
    reference: ReferenceOverlap | None = None,
) -> Objective:
    """The loss of a causal LM drafter: the target's distribution at every answer token.

    Args:
        module: whose head is read, once where it is frozen.
        target_head: the target's head over the draft vocabulary.
        reference: the overlap of the drafter that positions are selected by.
    """
    vocab = target_head.vocab
    trained = module.get_output_embeddings().weight.requires_grad
    frozen_rows = None if trained else draft_head(module, vocab)

    def terms(module: nn.Module, batch: Batch) -> Terms:
        hidden = states(module, batch)
        weight = draft_head(module, vocab) if frozen_rows is None else frozen_rows
        weigh = weigh_texts(
            config,
            batch.positions,
            given=batch.weights,
            reference_overlap=None if reference is None else reference(batch),
        )
        sums = head_loss(
            hidden,
            weight.to(hidden.device),
            target_head,
            batch.rows,
            batch.labels,
            config,
            weigh=weigh,
        )
        return terms_of(sums, batch.num_tokens)

    return terms


def reference_of(
    folder: str, target_head: TargetHead, config: LossConfig, device: torch.device
) -> ReferenceOverlap:
    """The overlap of a trained drafter, position by position.

    Raises:
        ValueError: if it proposes other tokens than the drafter under training.
    """
    module = load_module(folder, dtype=torch.float32, device=device).requires_grad_(False)
    vocab = read_draft_vocab(folder)
    own = target_head.vocab
    if not (own.is_full if vocab is None else torch.equal(vocab, own.token_ids)):
        raise ValueError(
            f"the reference {folder} has another draft vocabulary than the drafter: expected one "
            "that was trained on the same answers with the same draft.draft_vocab_size"
        )
    rows = draft_head(module, own)

    @torch.no_grad()
    def overlap(batch: Batch) -> Tensor:
        return position_overlaps(states(module, batch), rows, target_head, batch.rows, config)

    return overlap


def states(module: nn.Module, batch: Batch) -> Tensor:
    """[N, D] what the drafter's head reads at the loss positions."""
    body = getattr(module, module.base_model_prefix)  # type: ignore[call-overload]
    hidden = body(input_ids=batch.token_ids, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1)[batch.positions]


def draft_head(module: nn.Module, vocab: DraftVocab) -> Tensor:
    """[n, D] the rows of the drafter's head that it can propose; no copy of a frozen whole head."""
    head = module.get_output_embeddings().weight  # type: ignore[operator]
    if not head.requires_grad:
        head = head.detach()
    return head if len(vocab) == len(head) else head[vocab.token_ids.to(head.device)]


@torch.no_grad()
def _state_pairs(
    module: PreTrainedModel, examples: Sequence[Example], max_positions: int
) -> Iterator[tuple[Tensor, Tensor]]:
    module.eval()
    device = next(module.parameters()).device
    stream = BatchStream(examples, max_tokens=2048, seed=0)
    taken = number = 0
    while taken < max_positions and stream.epoch_of(number) == 0:
        batch = stream(number).to(device)
        yield states(module, batch), batch.target_states.float()
        taken, number = taken + batch.num_tokens, number + 1
