"""What the settings do to logits, as a list of processors in the order of `generate`.

transformers' own classes wherever it has them; ours are the penalties it lacks, and a top-p and a
typical-p that do not sort the whole vocabulary.

Shapes: n positions whose prompts and histories are equally long, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
)

from specdec_runtime.processor_states import remembers
from specdec_runtime.sampling_settings import SamplingSettings

_FIRST_WIDTH = 512  # tokens looked at first: usually more than hold the mass asked for


def make_processors(
    settings: SamplingSettings,
    eos_token_ids: Sequence[int],
    prompt_length: int,
    device: torch.device,
) -> LogitsProcessorList:
    """What `generate` applies whether it samples or not, in its order."""
    made = LogitsProcessorList()
    if settings.logit_bias:
        biases: list[list[list[int] | float]] = [
            [[int(token)], float(bias)] for token, bias in settings.logit_bias.items()
        ]
        made.append(SequenceBiasLogitsProcessor(biases))
    if settings.repetition_penalty != 1.0:
        made.append(RepetitionPenaltyLogitsProcessor(float(settings.repetition_penalty)))
    presence, frequency = settings.presence_penalty, settings.frequency_penalty
    if presence or frequency:
        made.append(_OutputCountPenalty(prompt_length, presence, frequency))
    if settings.bad_words_ids is not None:
        words = [list(map(int, word)) for word in settings.bad_words_ids]
        made.append(NoBadWordsLogitsProcessor(words))
    if settings.min_new_tokens and eos_token_ids:
        eos = torch.tensor(list(eos_token_ids), device=device)
        made.append(
            MinNewTokensLengthLogitsProcessor(prompt_length, int(settings.min_new_tokens), eos)
        )
    if not any(map(remembers, settings.logits_processors)):
        made.extend(settings.logits_processors)
    return made


def make_warpers(settings: SamplingSettings) -> LogitsProcessorList:
    """What `generate` applies only when it samples, after the temperature, in its order."""
    made = LogitsProcessorList()
    if settings.top_k is not None:
        made.append(TopKLogitsWarper(int(settings.top_k)))
    if settings.top_p is not None and settings.top_p < 1.0:
        made.append(_Nucleus(settings.top_p))
    if settings.min_p:
        made.append(MinPLogitsWarper(settings.min_p))
    if settings.typical_p is not None and settings.typical_p < 1.0:
        made.append(_Typical(settings.typical_p))
    return made


def needs_history(settings: SamplingSettings) -> bool:
    """Whether any processor looks at the tokens in front of a position."""
    return bool(
        settings.repetition_penalty != 1.0
        or settings.presence_penalty
        or settings.frequency_penalty
        or settings.min_new_tokens
        or any(len(word) > 1 for word in settings.bad_words_ids or [])
        or settings.logits_processors
    )


class _OutputCountPenalty(LogitsProcessor):
    """Presence and frequency penalties, over the tokens after the prompt."""

    def __init__(self, prompt_length: int, presence: float, frequency: float):
        self._prompt_length = prompt_length
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        output = input_ids[:, self._prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, output, scores.new_ones(output.shape))
        return scores - self._frequency * counts - self._presence * (counts > 0)


class _Nucleus(LogitsProcessor):
    """top-p as transformers' `TopPLogitsWarper`, without sorting the whole vocabulary.

    A token stays if the likelier ones hold less than top_p of the mass. On a CPU a sort of 50,000
    logits takes longer than a small model's layer, and a round does one a position.
    """

    def __init__(self, top_p: float):
        self._top_p = top_p

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        probs = scores.softmax(-1)
        top, index = _until(probs, self._top_p, lambda width: probs.topk(width).indices)
        likelier = top.cumsum(-1) - top
        kept = scores.gather(1, index).masked_fill(likelier >= self._top_p, -math.inf)
        return torch.full_like(scores, -math.inf).scatter(1, index, kept)


class _Typical(LogitsProcessor):
    """typical-p as transformers' `TypicalLogitsWarper`, without sorting the whole vocabulary.

    Tokens whose surprise is closest to the entropy stay, up to the first that brings their mass to
    typical_p, and all that are as close as that one (Meister et al. 2022, arXiv:2202.00666).
    """

    def __init__(self, typical_p: float):
        self._typical_p = typical_p

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        log_probs = scores.log_softmax(-1)
        probs = log_probs.exp()
        entropy = -(log_probs * probs).nansum(-1, keepdim=True)
        distance = (-log_probs - entropy).abs()
        typical, index = _until(
            probs, self._typical_p, lambda width: distance.topk(width, largest=False).indices
        )
        last = (typical.cumsum(-1) < self._typical_p).sum(-1, keepdim=True)
        last.clamp_(max=typical.shape[1] - 1)
        farthest = distance.gather(1, index.gather(1, last))
        return scores.masked_fill(distance > farthest, -math.inf)


def _until(probs: Tensor, mass: float, first: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
    """The first tokens in an order that hold `mass` in every row: probabilities and ids, [n, w].

    Args:
        first: the ids of the first `w` tokens in the order, [n, w].
    """
    # GPUs sort fast and would have to be waited for to look at the mass.
    width = probs.shape[1] if probs.is_cuda else min(_FIRST_WIDTH, probs.shape[1])
    while True:
        index = first(width)
        held = probs.gather(1, index)
        if width == probs.shape[1] or bool((held.sum(-1) >= mass).all()):
            return held, index
        width = min(8 * width, probs.shape[1])
