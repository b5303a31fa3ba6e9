"""transformers' own decoding of the target: the reference for texts, and a rival baseline."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from eval.exactness import (
    Texts,
    arithmetic_dtype,
    compare,
    implementation_noise,
    reference_choices,
    reference_texts,
    shape_noise,
    tie_tolerance,
)
from eval.identity import engine_of
from eval.results import BaselineCandidate, IdentityCheck
from eval.speed import Decode, speculative_decode, tokens_per_s, transformers_decode
from eval.suites import EvalPrompt
from specdec_runtime.loading import load_module
from specdec_runtime.target import Target

NOISE_TOKENS = 32  # enough passes to see rounding, cheap enough for a slow machine
BASELINE_TOKENS = 32  # tokens that tell the faster of two plain decoders


class Reference:
    """The target as a transformers model, loaded when first asked for.

    Where the target runs in transformers anyway, that model is used; for the C++ engine the
    weights are loaded again, in float32 for texts and as stored for speed.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._loaded: dict[str, Any] = {}

    @property
    def is_available(self) -> bool:
        """False for a target in memory that was converted for the C++ engine."""
        return hasattr(self._target.model, "module") or bool(self._target.source)

    def module(self, dtype: str) -> Any:
        """The model in "float32" or in "auto" = the stored dtype."""
        if hasattr(self._target.model, "module"):
            return self._target.model.module
        if dtype not in self._loaded:
            self._loaded[dtype] = load_module(
                self._target.source,
                dtype=dtype,
                device=self._target.model.device,
                revision=self._target.revision or None,
            )
        return self._loaded[dtype]

    def release(self) -> None:
        """Drop what was loaded, so that it does not disturb the timing."""
        self._loaded.clear()


def noise_tolerance(target: Target, token_ids: Sequence[int], *, width: int) -> float:
    """Top-two gap that the shape of a pass can flip on this machine; 0 for the C++ engine."""
    noise = shape_noise(target.model, token_ids[:NOISE_TOKENS], width=width)
    return tie_tolerance(noise, arithmetic_dtype(target.model))


def reference_checks(
    target: Target,
    reference: Reference,
    prompts: Sequence[EvalPrompt],
    texts: Sequence[list[int]],
    *,
    num_generated: int,
    limit_s: float,
    on_prompt: Callable[[int], None],
) -> list[IdentityCheck]:
    """Our plain greedy texts against transformers, in float32 where the engine computes in it.

    Two checks: every text against the choices of transformers' forward, one pass each, and the
    first few against its `generate`, token by token.

    Args:
        num_generated: prompts given to `generate`.
        limit_s: stop starting prompts after this; what was compared by then counts.
    """
    module = reference.module("float32")
    deadline = time.monotonic() + limit_s
    noise = implementation_noise(target.model, module, [*prompts[0].token_ids, *texts[0]])
    tolerance = tie_tolerance(noise, arithmetic_dtype(target.model))
    dtype = str(module.dtype).removeprefix("torch.")
    methods: list[tuple[str, int, Callable[[list[int], list[int]], list[int]]]] = [
        ("forward", len(prompts), lambda ids, text: reference_choices(module, ids, text)),
        ("generate", num_generated, lambda ids, text: _generated(target, module, ids, text)),
    ]
    checks = []
    for name, wanted, decode in methods:
        expected: list[list[int]] = []
        for prompt, text in list(zip(prompts, texts, strict=True))[:wanted]:
            if expected and time.monotonic() > deadline:
                break
            expected.append(decode(prompt.token_ids, text))
            on_prompt(1)
        count = len(expected)
        title = f"plain decoding against transformers' {name}, {dtype}"
        compared = Texts(title, expected, texts[:count])
        checks.append(compare(target, prompts[:count], compared, tolerance=tolerance))
    return checks


def _generated(target: Target, module: Any, ids: list[int], text: list[int]) -> list[int]:
    """What `generate` returns with room for as many tokens as the text has."""
    return reference_texts(
        module, [ids], max_new_tokens=len(text), eos_token_ids=target.eos_token_ids
    )[0]


def find_baseline(
    target: Target, reference: Reference, prompts: Sequence[list[int]], *, max_new_tokens: int
) -> list[BaselineCandidate]:
    """Tokens a second of every way to decode without a drafter; the fastest is marked."""
    amount = min(BASELINE_TOKENS, max_new_tokens)
    rates = {
        name: tokens_per_s(decode, prompts, max_new_tokens=amount)
        for name, decode in plain_decoders(target, reference).items()
    }
    fastest = max(rates, key=lambda name: rates[name])
    return [
        BaselineCandidate(name=name, tokens_per_s=rate, used=name == fastest)
        for name, rate in rates.items()
    ]


def plain_decoders(
    target: Target, reference: Reference, *, name: str | None = None
) -> dict[str, Decode]:
    """The plain decoders of this product: our loop in the engine in use, transformers' generate.

    Args:
        name: make only this one (another one may have to load the model again).
    """
    own = own_decoder(target)
    decoders = {own: speculative_decode(target, None, 0)}
    if reference.is_available and name != own:
        module = reference.module("auto")
        dtype = str(module.dtype).removeprefix("torch.")
        decoders[f"transformers generate, {dtype}"] = transformers_decode(
            module, target.eos_token_ids
        )
    return decoders


def own_decoder(target: Target) -> str:
    """Name of our plain decoding."""
    return f"Draftloop, engine {engine_of(target.model)}"
