"""The target: a model with what belongs to it, as decoding needs it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec_runtime.hf_model import HFModel
from specdec_runtime.model import CausalModel


@dataclass(kw_only=True)
class Target:
    """The model whose output is kept exactly.

    Attributes:
        model: ready to decode.
        tokenizer: a transformers tokenizer; None for bare models, which take and give ids only.
        name: what it is called: a hub id, an embedded name, or a path; "" for a model in memory.
        source: the folder or hub id that transformers loads it from; "" likewise.
        revision: commit of the hub repository, where known.
        fingerprint: hash of configuration and weights (see fingerprint.py); "" if not taken.
        eos_token_ids: ids that end a text.
        real_vocab_size: ids from here on are padding of the head and have no string.
        unused_token_ids: ids below that which have no string either.
    """

    model: CausalModel
    tokenizer: Any = None
    name: str = ""
    source: str = ""
    revision: str = ""
    fingerprint: str = ""
    eos_token_ids: tuple[int, ...] = ()
    real_vocab_size: int = 0
    unused_token_ids: tuple[int, ...] = field(default=())

    @property
    def device(self) -> torch.device:
        """Where the first of its weights are."""
        model = self.model
        return model.weights_device if isinstance(model, HFModel) else model.device

    def __post_init__(self) -> None:
        self.real_vocab_size = self.real_vocab_size or self.model.vocab_size


def as_target(target: Target | CausalModel | PreTrainedModel) -> Target:
    """A `Target` from one, from a bare `CausalModel`, or from a loaded transformers model."""
    if isinstance(target, Target):
        return target
    if isinstance(target, PreTrainedModel):
        eos = end_of_text_ids(target.generation_config, target.config)
        return Target(model=HFModel(target), eos_token_ids=eos)
    if not hasattr(target, "new_cache"):
        raise ValueError(
            f"target is {target!r}, expected a Target, as load_target gives it, or a loaded model"
        )
    return Target(model=target, eos_token_ids=end_of_text_ids(None, target.config))


def end_of_text_ids(generation_config: Any, config: Any) -> tuple[int, ...]:
    """The ids that end a text: the generation configuration's, else the model configuration's."""
    for source in (generation_config, config):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (ids,)
    return ()
