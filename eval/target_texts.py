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


def states_along(model: CausalModel, answer: Answer, layers: Sequence[int]) -> dict[int, Tensor]:
    """For each of these layers the model's states [L, D] of a text but its last token.

    Fewer where the model's positions end before the text does.
    """
    tokens = [*answer.prompt_ids, *answer.token_ids[:-1]][: model.max_positions]
    cache = model.new_cache(1, len(tokens))
    output = model.forward(torch.tensor([tokens]), cache, logits=False, hidden_layers=layers)
    return {layer: hidden[0] for layer, hidden in output.hidden.items()}
