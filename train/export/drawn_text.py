"""Whether texts that were drawn elsewhere are draws from the target's distribution.

Given the text so far, the log probability of the next draw has mean -H, the target's entropy there, and
a known variance. So the sum of (log p + H) over drawn tokens has mean 0 however a text goes on or ends;
in standard errors it says whether the tokens are too rare (flatter logits, another model) or too
likely (a lower temperature, greedy decoding).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_runtime.target import Target

ALLOWED = 4.0  # standard errors: right texts go beyond about once in 10,000 checks
_IMPOSSIBLE = -1e3  # of log p: its probability is 0 in float64, so it changes no sum


@dataclass(frozen=True)
class DrawnText:
    """Mean of a figure over drawn tokens, what the target's draws have on average, and how far apart.

    name: of the figure, for the terminal. score: the difference in standard errors.
    """

    name: str
    mean: float
    expected: float
    score: float

    @classmethod
    def of_moments(cls, name: str, moments: Tensor) -> "DrawnText":
        """From [N, 3]: the figure at each token, and the mean and the variance of a draw's.

        Raises:
            ValueError: nothing was drawn.
        """
        if not len(moments):
            raise ValueError("no drawn tokens to judge, expected at least one")
        found, expected, variance = moments.sum(0)
        score = 0.0 if found == expected else float((found - expected) / variance.sqrt())
        return cls(name, float(found) / len(moments), float(expected) / len(moments), score)

    @property
    def is_the_targets(self) -> bool:
        return abs(self.score) <= ALLOWED

    def describe(self) -> str:
        return f"{self.name} {self.mean:.2f}, expected {self.expected:.2f} ({self.score:+.1f} s.e.)"


@torch.inference_mode()
def drawn_text(
    target: Target, prompts: Sequence[list[int]], texts: Sequence[list[int]], temperature: float
) -> DrawnText:
    """Judge texts drawn at a temperature by the log probabilities that the target gives them.

    Raises:
        ValueError: nothing was drawn.
    """
    pairs = [(prompt, text) for prompt, text in zip(prompts, texts, strict=True) if text]
    moments = [_moments(target, *pair, temperature) for pair in pairs]
    return DrawnText.of_moments("log p", torch.cat(moments) if moments else torch.zeros(0, 3))


def _moments(target: Target, prompt: list[int], text: list[int], temperature: float) -> Tensor:
    """[N, 3] of each drawn token: its log probability, the mean and the variance of a draw's."""
    tokens = torch.tensor([[*prompt, *text]])
    cache = target.model.new_cache(1, tokens.shape[1])
    logits = target.model.forward(tokens, cache).logits
    assert logits is not None
    rows = logits[0, len(prompt) - 1 : -1].double() / temperature
    rows[:, target.real_vocab_size :] = -torch.inf
    log_p = rows.log_softmax(-1)
    found = log_p.gather(-1, tokens[0, len(prompt) :, None])[:, 0]
    p, log_p = log_p.exp(), log_p.clamp_min(_IMPOSSIBLE)
    mean = (p * log_p).sum(-1)
    return torch.stack([found, mean, (p * log_p**2).sum(-1) - mean**2], dim=-1)
