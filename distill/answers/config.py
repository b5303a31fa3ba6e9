"""How the target writes its answers."""

from dataclasses import dataclass, field
from enum import Enum

import torch


class HiddenDtype(Enum):
    """How the target's hidden states are stored."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"

    @property
    def torch(self) -> torch.dtype:
        return getattr(torch, self.value)


@dataclass(kw_only=True)
class AnswersConfig:
    """How the target writes its answers.

    Attributes:
        temperatures: each prompt is answered at one of these, in equal parts; write with those
            that the target is served with (a drafter is accepted most where it was trained).
        top_p: of the answers that are sampled; 1 keeps all tokens.
        max_new_tokens: of an answer, its end-of-text token included.
        max_prompt_tokens: longer prompts are left out, and counted.
        max_tokens: no answer is begun once so many tokens are written; null = all prompts.
        max_seconds: no answer is begun after this time; null = no limit.
        batch_size: answers written at once.
        hidden_dtype: of the target's last hidden states, from which the losses have its exact
            distribution; bfloat16 replaces float16 where a number is out of its range.
        shard_tokens: tokens of a file; what is not in a finished file is written again after an
            interruption.
        seed: of the noise; each answer's own noise follows from it and the prompt.
    """

    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.0, 1.0])
    top_p: float = 1.0
    max_new_tokens: int = 192
    max_prompt_tokens: int = 512
    max_tokens: int | None = None
    max_seconds: float | None = None
    batch_size: int = 64
    hidden_dtype: HiddenDtype = HiddenDtype.float16
    shard_tokens: int = 16384
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures or any(not 0 <= value < 100 for value in self.temperatures):
            raise ValueError(
                f"answers.temperatures must be one or more numbers from 0 (greedy) on, got "
                f"{self.temperatures}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"answers.top_p must be in (0, 1], got {self.top_p}")
        counts = ("max_new_tokens", "max_prompt_tokens", "batch_size", "shard_tokens")
        for name in (*counts, "max_tokens", "max_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"answers.{name} must be positive, got {value}")
