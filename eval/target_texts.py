"""Texts that the target wrote, and its states along them: made once, read for every drafter.

Shapes: n tokens of an answer, L = prompt + n - 1 tokens that the target reads, D hidden size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_runtime.model import CausalModel
from specdec_runtime.target import Target

HEAD_INPUT = -1  # the state that a model's head reads
HEAD_CHUNK = 64  # places whose scores are held at once: 64 x 49k floats are 12 MiB
# Most that is kept: two suites of 24 prompts at two temperatures take a fifth of it with a target
# of 135M parameters. What does not fit is made again for every drafter.
MEMORY_BYTES = 1 << 30


class Answer(NamedTuple):
    """One output of the target: the prompt, the new tokens, and the budget they had."""

    prompt_ids: list[int]
    token_ids: list[int]
    max_new_tokens: int


class TargetStates:
    """The target's states along its own texts.

    Args:
        layers: k of the residuals after k layers that drafters read.
    """

    def __init__(
        self, target: Target, layers: Sequence[int] = (), *, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self.target = target
        self._layers = tuple(sorted(set(layers)))
        self._left = memory_bytes
        self._kept: dict[tuple[int, ...], dict[int, Tensor]] = {}

    def head_input(self, answer: Answer) -> Tensor:
        """[m, D] states from which answer tokens 1, 2, ... are predicted, m <= n - 1."""
        return self._along(answer)[HEAD_INPUT]

    def residuals(self, answer: Answer, layers: Sequence[int]) -> dict[int, Tensor]:
        """For each of these layers the states [L, D] of the text but its last token."""
        states = self._along(answer)
        return {layer: states[layer] for layer in layers}

    @torch.inference_mode()
    def _along(self, answer: Answer) -> dict[int, Tensor]:
        start = len(answer.prompt_ids)
        key = (start, *answer.prompt_ids, *answer.token_ids)
        if key in self._kept:
            return self._kept[key]
        states = states_along(self.target.model, answer, (HEAD_INPUT, *self._layers))
        states[HEAD_INPUT] = states[HEAD_INPUT][start:].clone()
        size = sum(one.numel() * one.element_size() for one in states.values())
        if size <= self._left:
            self._left -= size
            self._kept[key] = states
        return states


class TargetScores(NamedTuple):
    """Of each answer token but the first; fewer where the target's positions end.

    log_probs: the target's, of that token, at the temperature of the text. entropies: of the
    target's distribution there at temperature 1, in nats.
    """

    log_probs: list[float]
    entropies: list[float]


@torch.inference_mode()
def target_scores(states: TargetStates, answer: Answer, *, temperature: float) -> TargetScores:
    """What the target's head says along one of its texts."""
    model, size = states.target.model, states.target.real_vocab_size
    answered = torch.tensor(answer.token_ids[1:])
    found = TargetScores([], [])
    for hidden, tokens in zip(
        states.head_input(answer).split(HEAD_CHUNK), answered.split(HEAD_CHUNK), strict=False
    ):
        logits = model.logits_of(hidden)[:, :size]
        found.log_probs.extend(log_probs_of(logits / temperature, tokens))
        found.entropies.extend(torch.special.entr(logits.softmax(-1)).sum(-1).tolist())
    return found


def log_probs_of(logits: Tensor, token_ids: Tensor) -> list[float]:
    """Of tokens [N] under [N, V] logits."""
    chosen = logits.gather(1, token_ids[:, None].to(logits.device))[:, 0]
    return (chosen - logits.logsumexp(-1)).double().tolist()


def states_along(model: CausalModel, answer: Answer, layers: Sequence[int]) -> dict[int, Tensor]:
    """For each of these layers the model's states [L, D] of a text but its last token.

    Fewer where the model's positions end before the text does.
    """
    tokens = [*answer.prompt_ids, *answer.token_ids[:-1]][: model.max_positions]
    cache = model.new_cache(1, len(tokens))
    output = model.forward(torch.tensor([tokens]), cache, logits=False, hidden_layers=layers)
    return {layer: hidden[0] for layer, hidden in output.hidden.items()}
