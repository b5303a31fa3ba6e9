"""What a drafter says along a text of the target: its scores wherever it could draft the text's tokens.

A draft counts only as far as it is the text, so its tokens are taken from the text. A causal LM and
the target's own first layers score a token alike whichever place the draft began at: one pass over
the text says it all. Drafters on the target's states go on from states of their own
(state_drafts.py): every place begins a draft that has to be followed.

Shapes: n tokens of an answer, N places, V the target's real vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from eval.state_drafts import Eagle3Text, ParallelText
from eval.target_texts import HEAD_CHUNK, HEAD_INPUT, Answer, TargetStates, states_along
from specdec_runtime.draft_vocabulary import DraftVocabulary
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.eagle3 import Eagle3Drafter
from specdec_runtime.drafters.early_exit import EarlyExitDrafter
from specdec_runtime.drafters.parallel import ParallelDrafter

ScoredDrafter = CausalLMDrafter | EarlyExitDrafter | Eagle3Drafter | ParallelDrafter
T = TypeVar("T")
# Scores [N, V] of the answer tokens places.start + 1, ... -> a value of each.
Read = Callable[[Tensor, slice], list[T]]


class TextDrafts(Protocol):
    """Place i begins the draft that would be answer token i + 1 and what follows it."""

    num_places: int  # at most n - 1
    room: list[int]  # [n - 1] most tokens that are drafted from each place

    def first(self, window: slice) -> Tensor:
        """[N, V] scores of the first token of the draft of each place."""

    def behind(self, place: int) -> Iterator[Tensor] | None:
        """[1, V] scores of the second, third, ... token of one draft, behind those of the text.

        None where these are the first ones of later places. Places are asked from the last to
        the first: what a cache holds of later ones may be gone.
        """


def text_drafts(
    states: TargetStates, drafter: ScoredDrafter, answer: Answer, *, max_draft_tokens: int
) -> TextDrafts:
    """The scores of one drafter along an answer of at least two tokens."""
    if isinstance(drafter, Eagle3Drafter):
        return Eagle3Text(states, drafter, answer)
    if isinstance(drafter, ParallelDrafter):
        return ParallelText(states, drafter, answer, max_draft_tokens)
    if isinstance(drafter, EarlyExitDrafter):
        return _EarlyExitText(states, drafter, answer)
    return _CausalText(states, drafter, answer)


@torch.inference_mode()
def read_along(
    states: TargetStates,
    drafter: ScoredDrafter,
    answer: Answer,
    read: Read[T],
    *,
    goes_on: Callable[[Sequence[T]], bool],
    max_draft_tokens: int,
) -> tuple[list[int], list[list[T]]]:
    """Of the draft that begins at each place, a value of every token of the text.

    Args:
        read: the values of some places.
        goes_on: whether, behind these values of a draft, its next one matters.

    Returns:
        How many tokens would be drafted from each place [n - 1], and their values, as far as the
        text reaches or they matter.
    """
    count = len(answer.token_ids) - 1
    if count < 1:
        return [], []
    drafts = text_drafts(states, drafter, answer, max_draft_tokens=max_draft_tokens)
    first: list[T] = []
    for start in range(0, drafts.num_places, HEAD_CHUNK):
        window = slice(start, min(start + HEAD_CHUNK, drafts.num_places))
        first += read(drafts.first(window), window)
    proposed = [max(0, min(max_draft_tokens, room)) for room in drafts.room]
    found: list[list[T]] = [[] for _ in range(count)]
    for place in reversed(range(drafts.num_places)):
        values, most = first[place : place + 1], min(proposed[place], count - place)
        later = drafts.behind(place)
        following = first[place + 1 :] if later is None else _values(later, read, place + 1)
        for value in islice(following, most - 1):
            if not goes_on(values):
                break
            values.append(value)
        found[place] = values[:most]
    return proposed, found


def _values(later: Iterator[Tensor], read: Read[T], place: int) -> Iterator[T]:
    for i, logits in enumerate(later, start=place):
        yield from read(logits, slice(i, i + 1))


class _CausalText:
    """A causal LM reads the text itself."""

    def __init__(self, states: TargetStates, drafter: CausalLMDrafter, answer: Answer) -> None:
        model, start = drafter.model, len(answer.prompt_ids)
        self._model = model
        self._vocab = DraftVocabulary(drafter.draft_vocab, model, states.target.real_vocab_size)
        self._hidden = states_along(model, answer, (HEAD_INPUT,))[HEAD_INPUT][start:]
        self.num_places = len(self._hidden)
        self.room = [model.max_positions - start - i for i in range(len(answer.token_ids) - 1)]

    def first(self, window: slice) -> Tensor:
        return self._vocab.to_target(self._model.logits_of(self._hidden[window]))

    def behind(self, place: int) -> None:
        return None


class _EarlyExitText:
    """The target's own first layers read the text."""

    def __init__(self, states: TargetStates, drafter: EarlyExitDrafter, answer: Answer) -> None:
        model, start = states.target.model, len(answer.prompt_ids)
        tokens = [*answer.prompt_ids, *answer.token_ids[:-1]]
        self._drafter = drafter
        self._vocab = DraftVocabulary(drafter.draft_vocab, model, states.target.real_vocab_size)
        layer = HEAD_INPUT if drafter.adapter is None else drafter.exit_layer
        output = model.forward(
            torch.tensor([tokens]),
            model.new_cache(1, len(tokens)),
            logits=False,
            hidden_layers=(layer,),
            layers=(0, drafter.exit_layer),
            early_head=True,
        )
        self._hidden = output.hidden[layer][0, start:]
        self.num_places = len(self._hidden)
        self.room = [model.max_positions] * self.num_places  # whatever the answer's budget leaves

    def first(self, window: slice) -> Tensor:
        hidden = self._hidden[window]
        if self._drafter.adapter is None:
            return self._vocab.to_target(self._drafter.model.logits_of(hidden))
        return self._vocab.to_target(self._drafter.adapted_logits(hidden))

    def behind(self, place: int) -> None:
        return None
