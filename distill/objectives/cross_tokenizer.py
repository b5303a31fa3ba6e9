"""A causal LM with another tokenizer than the target's, and what it is trained on.

Naming this kind is the declaration that the tokenizers differ; any other kind refuses such a model.
It reads the target's text in its own tokens (`distill.draft_contexts`) and learns two things, because
it is decoded with in two ways (`specdec_runtime.drafters.cross_tokenizer`):
- wherever a target token ends, the target's distribution over the tokens that both vocabularies have,
  its own renormalised over them: sampling draws from exactly that, so that `overlap` here is the
  chance that the runtime accepts its token;
- everywhere in an answer, the next token of its own, over its whole vocabulary (`text_weight`): greedy
  decoding lets it write text.

Shapes: B rows, S tokens, N loss positions of a batch in target tokens, M of them kept, P positions in
draft tokens, D hidden size, n shared tokens, W rows of the drafter's head.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from distill.batches import Batch, DraftRows, Example
from distill.chunked_head import HeadSums, head_loss
from distill.draft_contexts import DraftContexts
from distill.losses import LossConfig, LossName
from distill.objective import Objective, Terms, terms_of
from distill.position_weights import WeightScheme
from distill.recipe import DraftSettings, TargetParts, as_written
from distill.signals import TargetHead, rows_at
from specdec_runtime.drafters.cross_tokenizer import CrossTokenizerDrafter, Mode
from specdec_runtime.engines import Engine
from specdec_runtime.loading import load_module
from specdec_runtime.pretrained import load_tokenizer
from specdec_runtime.token_bytes import shared_tokens
from specdec_runtime.tokenizers import tokenizer_hash

_TEXT_CHUNK = 512  # positions whose logits over the drafter's whole vocabulary are held at once


@dataclass(kw_only=True)
class CrossTokenizerSettings(DraftSettings):
    """draft.* of a drafter with another tokenizer.

    model: hub id or folder of a causal LM with a tokenizer of its own, or a drafter of this kind that
        was trained before.
    text_weight: of the cross entropy of its own tokens, beside the loss on the target's
        distribution; both are sums over tokens. 0 trains for sampling alone.
    train_embeddings: train embeddings and head as well.
    draft_vocab_size: null, since what can be proposed is what both vocabularies have.
    """

    kind: str = "cross_tokenizer"
    draft_vocab_size: int | None = None
    model: str | None = None
    text_weight: float = 0.5
    train_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is None:
            raise ValueError(
                "draft.kind=cross_tokenizer needs draft.model: the folder or hub id of a causal LM "
                "with a tokenizer of its own"
            )
        if self.draft_vocab_size is not None:
            raise ValueError(
                f"draft.draft_vocab_size is {self.draft_vocab_size}, expected null: a drafter with "
                "another tokenizer proposes the tokens that both vocabularies have"
            )
        if not self.text_weight >= 0:
            raise ValueError(f"draft.text_weight must be 0 or more, got {self.text_weight}")

    def fixed_tokens(self, target_tokenizer: Any) -> Tensor:
        assert self.model is not None
        return _shared(load_tokenizer(self.model), target_tokenizer)[1]


SETTINGS = CrossTokenizerSettings


def make(settings: CrossTokenizerSettings, parts: TargetParts) -> "CrossTokenizerRecipe":
    """The drafter that the settings describe.

    Raises:
        ValueError: if there is no such model, it has the target's tokenizer, or shares no token.
    """
    assert settings.model is not None
    tokenizer = load_tokenizer(settings.model)
    if tokenizer_hash(tokenizer) == tokenizer_hash(parts.target.tokenizer):
        raise ValueError(
            f"{settings.model} has the target's tokenizer: train it with draft=causal_lm "
            "draft.source=model, which needs no re-encoding"
        )
    module = load_module(settings.model, dtype=torch.float32, device="cpu")
    if not settings.train_embeddings:
        module.get_input_embeddings().requires_grad_(False)
        module.get_output_embeddings().requires_grad_(False)
    return CrossTokenizerRecipe(settings, parts, module, tokenizer)


class CrossTokenizerRecipe:
    """A causal LM with a tokenizer of its own under training; see `distill.recipe.Recipe`."""

    feature_layers: tuple[int, ...] = ()
    scored_settings: Mapping[str, Any] = MappingProxyType({"mode": Mode.tokens.value})

    def __init__(
        self,
        settings: CrossTokenizerSettings,
        parts: TargetParts,
        module: PreTrainedModel,
        tokenizer: Any,
    ) -> None:
        self.module = module
        self.tokenizer = tokenizer
        self._settings = settings
        self._target_tokenizer = parts.target.tokenizer
        self._head = parts.head
        self._draft_ids, target_ids = _shared(tokenizer, self._target_tokenizer)
        assert torch.equal(target_ids, parts.vocab.token_ids), "the head is cut to other tokens"
        self._contexts = DraftContexts(
            tokenizer,
            self._target_tokenizer,
            max_positions=getattr(module.config, "max_position_embeddings", 2**31),
        )

    def solve_start(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        return {}

    def put_start(self, computed: dict[str, Tensor]) -> None:
        assert not computed, computed.keys()

    def objective(self, loss: LossConfig) -> Objective:
        is_weighted = loss.weights.scheme is not WeightScheme.uniform
        if is_weighted or loss.selection.reference or loss.name is LossName.expected_length:
            raise ValueError(
                "draft.kind=cross_tokenizer has gaps where the tokenizers end tokens at different "
                "places: loss.weights, loss.selection and loss.name=expected_length are for others"
            )
        device = next(self.module.parameters()).device
        return objective(
            self.module,
            self._contexts,
            self._head.to(device),
            self._draft_ids.to(device),
            loss,
            text_weight=self._settings.text_weight,
        )

    def prepared(self, batch: Batch) -> Batch:
        """Re-encoding asks for token ids on the host; a device would be waited for."""
        return replace(batch, draft_rows=self._contexts(batch, scoring=False))

    def drafter(self, *, engine: Engine) -> CrossTokenizerDrafter:
        return CrossTokenizerDrafter.from_module(
            self.module, self.tokenizer, self._target_tokenizer, engine=engine
        )

    def snapshot(self) -> "CrossTokenizerRecipe":
        copied = copy.copy(self)
        copied.module = copy.deepcopy(self.module)
        return copied

    def written(self, dtype: torch.dtype) -> PreTrainedModel:
        return as_written(copy.deepcopy(self.module), dtype, self._settings)

    def writing_report(self, written: PreTrainedModel) -> dict[str, float]:
        return {}

    def kind_config(self) -> dict[str, Any]:
        return {}

    def compile(self) -> None:
        getattr(self.module, self.module.base_model_prefix).compile(dynamic=True)


def objective(
    module: PreTrainedModel,
    contexts: DraftContexts,
    target_head: TargetHead,
    draft_ids: Tensor,
    config: LossConfig,
    *,
    text_weight: float,
) -> Objective:
    """The loss of a drafter with another tokenizer; in eval mode every position is scored.

    Args:
        module: whose head over the shared tokens is read, once where it is frozen.
        target_head: over the shared tokens.
        draft_ids: [n] what the drafter calls them.
    """
    given = module.get_output_embeddings().weight
    frozen_rows = None if given.requires_grad else given.detach()[draft_ids]

    def terms(module: nn.Module, batch: Batch) -> Terms:
        rows = batch.draft_rows if module.training else None
        if rows is None:
            rows = contexts(batch, scoring=not module.training)
        body = getattr(module, module.base_model_prefix)  # type: ignore[call-overload]
        hidden = body(input_ids=rows.token_ids, use_cache=False).last_hidden_state.flatten(0, 1)
        head = module.get_output_embeddings().weight  # type: ignore[operator]
        shared = head[draft_ids] if frozen_rows is None else frozen_rows
        found = _on_shared_tokens(hidden, shared, target_head, batch, rows, config)
        num_kept, num_texts = len(rows.kept), len(rows.text_labels)
        text = hidden.new_zeros(())
        if module.training and text_weight:
            text = _text_loss(hidden[rows.text_positions], head, rows.text_labels)
        known = terms_of(found, num_kept)
        counts = known.counts | {
            "tokens_ending_together": _share(num_kept, batch.num_tokens, hidden),
            "text_loss": (text.detach(), _number(num_texts, hidden)),
        }
        return Terms(known.loss_sum + text_weight * text, batch.num_tokens, counts)

    return terms


def _on_shared_tokens(
    hidden: Tensor,
    head: Tensor,
    target_head: TargetHead,
    batch: Batch,
    rows: DraftRows,
    config: LossConfig,
) -> HeadSums:
    """The loss against the target's distribution; zeros where no token ends in both tokenizations."""
    if not len(rows.kept):
        zero = _number(0, hidden)
        slack = zero if batch.rows.is_truncated else None
        return HeadSums(hidden.sum() * 0.0, zero, zero, slack, zero, zero)
    return head_loss(
        hidden[rows.positions],
        head,
        target_head,
        rows_at(batch.rows, rows.kept),  # type: ignore[type-var]
        batch.labels[rows.kept],
        config,
    )


def _text_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Summed cross entropy [P] of the drafter's own next tokens; one chunk of logits at a time."""
    total = hidden.new_zeros((), dtype=torch.float32)
    for states, wanted in zip(hidden.split(_TEXT_CHUNK), labels.split(_TEXT_CHUNK), strict=True):
        total = total + checkpoint(_cross_entropy, states, head, wanted, use_reentrant=False)
    return total


def _cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head).float(), labels, reduction="sum")


def _shared(tokenizer: Any, target_tokenizer: Any) -> tuple[Tensor, Tensor]:
    """(draft ids [n], target ids [n]) of the shared tokens, by ascending target id."""
    draft_ids, target_ids = shared_tokens(tokenizer, target_tokenizer)
    order = target_ids.argsort()
    return draft_ids[order], target_ids[order]


def _share(part: int, whole: int, like: Tensor) -> tuple[Tensor, Tensor]:
    return _number(part, like), _number(whole, like)


def _number(value: int, like: Tensor) -> Tensor:
    return torch.full((), float(value), device=like.device)
