"""What drafters on the target's states say along a text: see text_drafts.py.

Their layer's cache holds an entry for every state that the target has handed over; a draft adds its
own behind those. Here one pass makes the entries of the whole text, and the drafts are followed from
the last place to the first: each begins by cutting the cache to what the target had handed over when
its round began, which is a smaller length and nothing else. So every number is computed from the
same slots as in decoding, and on the C++ engine it is the same number.

Shapes: n tokens of an answer, N places, K tokens of a draft, D hidden size, V vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from eval.target_texts import HEAD_INPUT, Answer, TargetStates
from specdec_runtime.draft_vocabulary import DraftVocabulary
from specdec_runtime.drafters.eagle3 import Eagle3Drafter
from specdec_runtime.drafters.parallel import ParallelDrafter
from specdec_runtime.model import Cache

ONE_LAYER = (0, 1)


class Eagle3Text:
    """An EAGLE-3 layer along a text: after the first token it goes on from states of its own."""

    def __init__(self, states: TargetStates, drafter: Eagle3Drafter, answer: Answer) -> None:
        text, start = [*answer.prompt_ids, *answer.token_ids], len(answer.prompt_ids)
        model = drafter.model
        # Entry i is made of the state at i and token i + 1, and scores token i + 2.
        count = min(len(text) - 2, model.max_positions)
        fused = drafter.fuse(_side_by_side(states, drafter, answer)[:count])
        self._drafter, self._model, self._start = drafter, model, start
        self._vocab = DraftVocabulary(drafter.draft_vocab, model, states.target.real_vocab_size)
        self._tokens = torch.tensor(answer.token_ids)
        self._cache = model.new_cache(1, count)
        output = model.forward(
            torch.tensor([text[1 : count + 1]]),
            self._cache,
            logits=False,
            hidden_layers=tuple({HEAD_INPUT, drafter.hands_on}),
            layers=ONE_LAYER,
            hidden_in=fused[None],
        )
        self._hidden = output.hidden[HEAD_INPUT][0, start - 1 :]
        self._handed_on = output.hidden[drafter.hands_on][0, start - 1 :]
        self.num_places = len(self._hidden)
        self.room = [model.max_positions - start - i + 1 for i in range(len(answer.token_ids) - 1)]

    def first(self, window: slice) -> Tensor:
        return self._vocab.to_target(self._model.logits_of(self._hidden[window]))

    def behind(self, place: int) -> Iterator[Tensor]:
        """One entry a token, made of the state before it."""
        self._cache.truncate([self._start + place])
        entering = self._handed_on[place]
        for token in self._tokens[place + 1 : -1]:
            output = self._model.forward(
                token.view(1, 1),
                self._cache,
                hidden_layers=(self._drafter.hands_on,),
                layers=ONE_LAYER,
                hidden_in=entering.view(1, 1, -1),
            )
            assert output.logits is not None
            entering = output.hidden[self._drafter.hands_on][0, 0]
            yield self._vocab.to_target(output.logits[0])


class ParallelText:
    """A block drafter along a text: one pass a place, over the whole block."""

    def __init__(
        self, states: TargetStates, drafter: ParallelDrafter, answer: Answer, max_draft_tokens: int
    ) -> None:
        model, start, places = drafter.model, len(answer.prompt_ids), len(answer.token_ids) - 1
        self._drafter, self._model = drafter, model
        self._vocab = DraftVocabulary(drafter.draft_vocab, model, states.target.real_vocab_size)
        self._tokens = torch.tensor(answer.token_ids)
        self.room = [model.max_positions - start - i for i in range(places)]
        self.num_places = max(0, min(places, model.max_positions - start))
        self._blocks: list[Tensor] = []  # of each place [K, D], what the head reads
        if self.num_places:
            count = start + self.num_places - 1  # states that the last block has in front of it
            cache = model.new_cache(1, count + max_draft_tokens)
            self._enter(drafter.fuse(_side_by_side(states, drafter, answer)[:count]), cache)
        for place in reversed(range(self.num_places)):
            cache.truncate([start + place])
            size = min(max_draft_tokens, places - place, self.room[place])
            self._blocks.append(self._enter(drafter.block(answer.token_ids[place], size), cache))
        self._blocks.reverse()

    def first(self, window: slice) -> Tensor:
        hidden = torch.stack([block[0] for block in self._blocks[window]])
        return self._scores(hidden, self._tokens[window])

    def behind(self, place: int) -> Iterator[Tensor]:
        """The block's next places, behind the text's tokens."""
        later = self._tokens[place + 1 :]
        for hidden, token in zip(self._blocks[place][1:], later, strict=False):
            yield self._scores(hidden[None], token[None])

    def _scores(self, hidden: Tensor, before: Tensor) -> Tensor:
        """[N, V] at places with `hidden` [N, D] behind the tokens `before` [N]."""
        _, bias = self._drafter.following(before)
        return self._vocab.to_target(self._model.logits_of(hidden) + bias)

    def _enter(self, entering: Tensor, cache: Cache) -> Tensor:
        """[N, D] what the head reads at entries that are appended to the cache."""
        output = self._model.forward(
            torch.zeros(1, len(entering), dtype=torch.int64),
            cache,
            logits=False,
            hidden_layers=(HEAD_INPUT,),
            layers=ONE_LAYER,
            hidden_in=entering[None],
        )
        return output.hidden[HEAD_INPUT][0]


def _side_by_side(
    states: TargetStates, drafter: Eagle3Drafter | ParallelDrafter, answer: Answer
) -> Tensor:
    """[L, A * D] the target's states that the drafter reads."""
    found = states.residuals(answer, drafter.hidden_layers)
    return torch.cat([found[layer] for layer in drafter.hidden_layers], dim=-1)
