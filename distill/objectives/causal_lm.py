"""How a standalone causal LM drafter is made from its target, and what it is trained on.

Made of the target's own parts: its embeddings (frozen), a few of its layers, its final norm, and its
head behind a fitted linear map (`lens.py`), so that it is of use before the first step. Trained: the
layers and the norm, on the target's distribution at every token of the target's own answers.

The first layers are the ones to take: they read what the embeddings say, while later ones expect
states that only the layers in between can make. Measured on SmolLM2-135M (overlap on held-out
answers before any training, layers with their lens): [0] .31, [0, 1] .33, [0, 1, 2] .34,
[0, 29] .26.

Shapes: B rows, S tokens, N loss positions, D hidden size, n draft vocabulary.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from distill.batches import Batch, BatchStream, Example
from distill.chunked_head import head_loss
from distill.draft_vocab import DraftVocab
from distill.lens import fit_lens, fold_lens
from distill.losses import LossConfig
from distill.objective import Objective, Terms, terms_of
from distill.signals import TargetHead
from specdec_runtime.layer_access import decoder_layers

LENS_POSITIONS = 30_000  # enough for the D x D numbers of a small target; more changes little


@dataclass(kw_only=True)
class DraftConfig:
    """draft.*

    layers: of the target, in the order in which the drafter runs them.
    draft_vocab_size: tokens that the drafter can propose; null = all.
    fit_head: start from the fitted linear map instead of the target's bare head.
    """

    layers: list[int] = field(default_factory=lambda: [0, 1])
    draft_vocab_size: int | None = 8192
    fit_head: bool = True

    def __post_init__(self) -> None:
        if not self.layers or min(self.layers) < 0:
            raise ValueError(
                f"draft.layers must name at least one layer of the target, from 0, got "
                f"{list(self.layers)}"
            )
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ValueError(
                f"draft.draft_vocab_size must be at least 1 or null, got {self.draft_vocab_size}"
            )


def make_module(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A causal LM of the target's kind with only `layers` of its layers, in float32.

    Embeddings and head are the target's and frozen.

    Raises:
        ValueError: if the target has no such layer.
    """
    depth = target.config.num_hidden_layers
    if max(layers) >= depth:
        raise ValueError(
            f"draft.layers names layer {max(layers)}, the target has layers 0 to {depth - 1}"
        )
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(layers)
    config.dtype = torch.float32
    if getattr(config, "layer_types", None):
        config.layer_types = [target.config.layer_types[layer] for layer in layers]
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    names = dict(_kept_names(target, layers))
    found = target.state_dict()
    module.load_state_dict({new: found[old].float() for new, old in names.items()}, strict=True)
    module.get_input_embeddings().requires_grad_(False)
    module.get_output_embeddings().requires_grad_(False)
    return module


def fit_head(
    module: PreTrainedModel, examples: Sequence[Example], *, max_positions: int = LENS_POSITIONS
) -> None:
    """Fits the drafter's head to the target's states on the examples, in place (see `lens.py`)."""
    fold_lens(module, fit_lens(_state_pairs(module, examples, max_positions)))


def objective(module: PreTrainedModel, target_head: TargetHead, config: LossConfig) -> Objective:
    """The loss of a causal LM drafter: the target's distribution at every answer token.

    Args:
        module: whose frozen head is read, once.
        target_head: the target's head over the draft vocabulary.
    """
    rows = draft_head(module, target_head.vocab)

    def terms(module: nn.Module, batch: Batch) -> Terms:
        hidden = states(module, batch)
        weight = rows.to(hidden.device)
        sums = head_loss(hidden, weight, target_head, batch.rows, batch.labels, config)
        return terms_of(sums, batch.num_tokens)

    return terms


def states(module: nn.Module, batch: Batch) -> Tensor:
    """[N, D] what the drafter's head reads at the loss positions."""
    body = getattr(module, module.base_model_prefix)  # type: ignore[call-overload]
    hidden = body(input_ids=batch.token_ids, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1)[batch.positions]


def draft_head(module: PreTrainedModel, vocab: DraftVocab) -> Tensor:
    """[n, D] the rows of the drafter's frozen head that it can propose."""
    head = module.get_output_embeddings().weight.detach()
    return head if vocab.is_full else head[vocab.token_ids.to(head.device)].contiguous()


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
        yield states(module, batch), batch.rows.hidden.float()
        taken, number = taken + batch.num_tokens, number + 1


def _kept_names(target: PreTrainedModel, layers: Sequence[int]) -> Iterator[tuple[str, str]]:
    """(name in the drafter, name in the target) of every tensor that the drafter has."""
    stack = decoder_layers(target, target.config.num_hidden_layers)
    prefix = next(name for name, part in target.named_modules() if part is stack) + "."
    for name in target.state_dict():
        if not name.startswith(prefix):
            yield name, name
            continue
        number, rest = name.removeprefix(prefix).split(".", 1)
        for new, old in enumerate(layers):
            if int(number) == old:
                yield f"{prefix}{new}.{rest}", name
