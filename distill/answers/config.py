"""How the target writes its answers."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

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
class ServerConfig:
    """A server that runs the target and writes the answers in place of the product's own runtime.

    Attributes:
        url: of an OpenAI-compatible API, as http://HOST:PORT/v1; null = the runtime writes.
        model: as the server calls it; null = the only one that it serves.
        concurrency: requests at once; as many as the server batches.
        timeout_s: seconds until a request without an answer counts as failed.
        max_retries: of a request that fails for a reason that may pass.
        api_key_variable: environment variable with the key, where one is asked for.
        extra: further fields of every request, part of the fingerprint. The default switches off
            what servers add on their own: their defaults or the model's would change the sampling.
    """

    url: str | None = None
    model: str | None = None
    concurrency: int = 32
    timeout_s: float = 600.0
    max_retries: int = 8
    api_key_variable: str = "OPENAI_API_KEY"
    extra: dict[str, Any] = field(
        default_factory=lambda: {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    )

    def __post_init__(self) -> None:
        for name in ("concurrency", "timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"answers.server.{name} must be positive, got {getattr(self, name)}"
                )
        if self.max_retries < 0:
            raise ValueError(
                f"answers.server.max_retries must be 0 or more, got {self.max_retries}"
            )


@dataclass(kw_only=True)
class AnswersConfig:
    """How the target writes its answers.

    Attributes:
        temperatures: each prompt is answered at one of these, in equal parts; write with those
            that the target is served with (a drafter is accepted most where it was trained).
        top_p: of the answers that are sampled; 1 keeps all tokens.
        samples_per_prompt: answers to each prompt; a second greedy one, which would be the first
            again, is left out.
        max_new_tokens: of an answer, its end-of-text token included.
        max_prompt_tokens: longer prompts are left out, and counted.
        max_tokens: no answer is begun once so many tokens are written; null = all prompts.
        max_seconds: no answer is begun after this time; null = no limit.
        batch_size: answers written at once.
        drafter: "lookup", or a drafter folder for this target, to write with; null = plainly, which
            is faster in large batches. Sampled answers are others with it.
        num_draft_tokens: drafted a round.
        keep_states: record the target's last hidden states while it writes; without them, a signal
            is computed afterwards (signals.form).
        hidden_dtype: of the target's last hidden states, from which the losses have its exact
            distribution; bfloat16 replaces float16 where a number is out of its range.
        shard_tokens: tokens of a file; what is not in a finished file is written again after an
            interruption.
        seed: of the noise; each answer's own noise follows from it and the prompt.
        server: that writes instead.
    """

    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.0, 1.0])
    top_p: float = 1.0
    samples_per_prompt: int = 1
    max_new_tokens: int = 192
    max_prompt_tokens: int = 512
    max_tokens: int | None = None
    max_seconds: float | None = None
    batch_size: int = 64
    drafter: str | None = None
    num_draft_tokens: int = 3
    keep_states: bool = True
    hidden_dtype: HiddenDtype = HiddenDtype.float16
    shard_tokens: int = 16384
    seed: int = 0
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        if not self.temperatures or any(not 0 <= value < 100 for value in self.temperatures):
            raise ValueError(
                f"answers.temperatures must be one or more numbers from 0 (greedy) on, got "
                f"{self.temperatures}"
            )
        if self.drafter is not None and self.server.url is not None:
            raise ValueError(
                "answers.drafter and answers.server.url contradict each other: a server drafts by "
                "its own settings"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"answers.top_p must be in (0, 1], got {self.top_p}")
        counts = ("samples_per_prompt", "max_new_tokens", "max_prompt_tokens", "batch_size")
        others = ("num_draft_tokens", "shard_tokens", "max_tokens", "max_seconds")
        for name in counts + others:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"answers.{name} must be positive, got {value}")
