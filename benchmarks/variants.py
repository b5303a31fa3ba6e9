"""Ways to decode the same prompts, ours and transformers', and the clock over all of them.

All variants take turns, so that a disturbance of the machine hits all of them; the first turn
warms up and is not counted. Texts never end early (end-of-text is ignored), so every variant
decodes equally many tokens.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, CompileConfig, PreTrainedModel

from specdec_runtime import SpeculativeDecoder
from specdec_runtime.draft import Drafter
from specdec_runtime.model_names import resolve_model
from specdec_runtime.target import Target

Prompts = list[list[int]]


class Variant(NamedTuple):
    """One way to decode a prompt.

    kind: what its speed is compared within: "plain", or the name of a drafter.
    """

    name: str
    kind: str
    is_ours: bool
    decode: Callable[[list[int]], object]


def our_variants(
    target: Target, drafters: dict[str, Drafter], new_tokens: int, num_draft_tokens: int
) -> list[Variant]:
    """Our loop without a drafter and with each of them, at a fixed draft length and at "auto"."""

    def variant(kind: str, drafter: Drafter | None, length: int | str) -> Variant:
        decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=length)

        def decode(prompt: list[int]) -> object:
            return decoder.generate([prompt], max_new_tokens=new_tokens, eos_token_id=[])

        return Variant(f"ours, {kind}, K={length}", kind, True, decode)

    variants = [variant("plain", None, 0)]
    for kind, drafter in drafters.items():
        variants += [variant(kind, drafter, length) for length in (num_draft_tokens, "auto")]
    return variants


def their_variants(
    target_name: str,
    draft_name: str | None,
    dtype: torch.dtype,
    *,
    new_tokens: int,
    num_draft_tokens: int,
    compiled_length: int | None,
) -> list[Variant]:
    """transformers' generate: plain, compiled, and assisted by the same drafters.

    Args:
        draft_name: the folder of the drafting model; None = prompt lookup alone.
        compiled_length: longest text, for a static cache of one size; None = no compiled variant.
    """
    module = _loaded(target_name, dtype)
    label = str(dtype).removeprefix("torch.")

    def variant(name: str, kind: str, module: Any = module, **options: Any) -> Variant:
        return Variant(f"{name}, {label}", kind, False, _generation(module, new_tokens, options))

    variants = [variant("generate", "plain")]
    if compiled_length is not None:
        config = CompileConfig()
        config._compile_all_devices = True  # otherwise CPUs are left out
        static: Any = _loaded(target_name, dtype)
        static.generation_config.cache_implementation = "static"
        static.generation_config.max_cache_len = compiled_length  # or every length compiles anew
        variants.append(
            variant("generate, static and compiled", "plain", static, compile_config=config)
        )
    lookup = {"prompt_lookup_num_tokens": num_draft_tokens}
    variants.append(variant("generate, prompt lookup", "lookup", **lookup))
    if draft_name is not None:
        draft = _loaded(draft_name, dtype)
        draft.generation_config.num_assistant_tokens = num_draft_tokens
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        variants.append(variant("generate, assisted", "causal_lm", assistant_model=draft))
    return variants


def measured(
    variants: Sequence[Variant], prompts: Prompts, *, repeats: int, deadline: float
) -> dict[str, list[float]]:
    """Seconds over all prompts, per variant and turn.

    Args:
        deadline: on the clock of `time.monotonic`; no further turn begins after it.
    """
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for variant in variants:
        variant.decode(prompts[0])
    for turn in range(repeats):
        if turn and time.monotonic() > deadline:
            break
        for variant in variants:
            start = time.perf_counter()
            for prompt in prompts:
                variant.decode(prompt)
            seconds[variant.name].append(time.perf_counter() - start)
    return seconds


def _loaded(name: str, dtype: torch.dtype) -> PreTrainedModel:
    module: Any = AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=dtype).eval()
    module.generation_config.eos_token_id = None
    return module


def _generation(
    module: PreTrainedModel, new_tokens: int, options: dict[str, Any]
) -> Callable[[list[int]], object]:
    def decode(prompt: list[int]) -> object:
        ids = torch.tensor([prompt])
        return module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            **options,
        )

    return decode
