"""Asks a drafter at every position of a text, as if each were the start of a round.

Its session gets what the decoder gives it: the states that it reads, round after round, or the
target's own cache, for those that draft on it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from eval.target_texts import Answer, TargetStates
from specdec_runtime.draft import Drafter, TargetSharing
from specdec_runtime.draft_length import LengthRound, LengthSession
from specdec_runtime.drafters.early_exit import EarlyExitDrafter
from specdec_runtime.model import Cache
from specdec_runtime.sampling import Sampler
from specdec_runtime.sampling_settings import SamplingSettings
from specdec_runtime.target import Target


class Asked(NamedTuple):
    """What was drafted behind the first `position` tokens of an answer."""

    position: int
    token_ids: list[int]


@torch.inference_mode()
def asked_along(
    states: TargetStates,
    drafter: Drafter,
    answer: Answer,
    lengths: LengthSession,
    *,
    most: int,
    needs_confidence: bool = False,
) -> Iterator[Asked]:
    """The greedy draft from every position of an answer but the first.

    Args:
        lengths: how many tokens are drafted, at most `most`; told that none was kept.
    """
    target, text = states.target, [*answer.prompt_ids, *answer.token_ids]
    capacity = len(text) + most + 1
    session = drafter.begin(1, capacity, _greedy_sampler(target, answer))
    cache = target.model.new_cache(1, capacity)
    if isinstance(session, TargetSharing):
        session.share(target.model, cache)
    read = states.residuals(answer, drafter.hidden_layers)
    known = 0  # states that the session has been given
    for position in range(1, len(answer.token_ids)):
        committed = [text[: len(answer.prompt_ids) + position]]
        new = slice(known, len(committed[0]) - 1)
        if isinstance(drafter, EarlyExitDrafter):
            _feed(drafter, cache, text[new])
        features = {layer: hidden[None, new] for layer, hidden in read.items()}
        known = new.stop
        asked = LengthRound(lengths, [0], [most], needs_confidence=needs_confidence)
        draft = session.propose([0], committed, asked, features)
        session.commit([0], committed)
        asked.finish([0])
        yield Asked(position, draft.token_ids[0, : int(draft.num_drafted[0])].tolist())


def _greedy_sampler(target: Target, answer: Answer) -> Sampler:
    return Sampler(
        SamplingSettings(),
        batch_size=1,
        prompt_lengths=[len(answer.prompt_ids)],
        eos_token_ids=target.eos_token_ids,
        real_vocab_size=target.real_vocab_size,
        device=target.model.device,
    )


def _feed(drafter: EarlyExitDrafter, cache: Cache, token_ids: list[int]) -> None:
    """What verification leaves in the cache of the layers that draft."""
    layers = (0, drafter.exit_layer)
    drafter.model.forward(torch.tensor([token_ids]), cache, logits=False, layers=layers)
