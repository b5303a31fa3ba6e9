"""The target: a model with what belongs to it, as decoding needs it."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec_runtime.hf_model import HFModel
from specdec_runtime.model import CausalModel

# Settings that transformers' greedy `generate` takes from a model's generation configuration.
_DEFAULTS_OF_GENERATE = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "min_new_tokens",
    "suppress_tokens",
    "begin_suppress_tokens",
    "sequence_bias",
)


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
        warn_of_defaults(target.generation_config)
        return Target(model=HFModel(target), eos_token_ids=eos)
    if not hasattr(target, "new_cache"):
        raise ValueError(
            f"target is {target!r}, expected a Target, as load_target gives it, or a loaded model"
        )
    return Target(model=target, eos_token_ids=end_of_text_ids(None, target.config))


def warn_of_defaults(generation_config: Any) -> None:
    """Say which settings of the model's own are not applied: only those of a call are."""
    values = {name: getattr(generation_config, name, None) for name in _DEFAULTS_OF_GENERATE}
    found = [f"{name}={value}" for name, value in values.items() if value not in (None, 0, 1, [])]
    if found:
        warnings.warn(
            f"the target's generation configuration sets {', '.join(found)}, which transformers' "
            "generate applies by itself; here only what a call names is applied: give it there",
            stacklevel=3,
        )


def end_of_text_ids(generation_config: Any, config: Any) -> tuple[int, ...]:
    """The ids that end a text: the generation configuration's, else the model configuration's."""
    for source in (generation_config, config):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (ids,)
    return ()
