"""transformers' own assisted generation with the same drafter, beside ours.

Where transformers can run a drafter at all: a standalone causal LM as `assistant_model`, and prompt
lookup. Same prompts, same number of drafted tokens, its constant schedule, weights as stored; timed
interleaved with ours, texts compared with ours token by token.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from eval.facts import DrafterFacts
from eval.on_request import RivalResult
from eval.reference import Reference
from eval.speed import Decode, Timing, speculative_decode, time_interleaved, transformers_decode
from eval.suites import EvalPrompt
from specdec_runtime.draft import Drafter
from specdec_runtime.loading import load_module
from specdec_runtime.target import Target

OURS, THEIRS = "ours", "theirs"
NUM_REPEATS = 2


def measure_rival(
    target: Target,
    drafter: Drafter,
    facts: DrafterFacts,
    prompts: Sequence[EvalPrompt],
    *,
    suite: str,
    num_draft_tokens: int,
    max_new_tokens: int,
    reference: Reference,
) -> RivalResult | None:
    """Seconds a token of both programs; None where transformers cannot run this drafter."""
    arguments = _arguments(facts, target, num_draft_tokens)
    if arguments is None or not reference.is_available:
        return None
    module = reference.module("auto")
    decoders: dict[str, Decode] = {
        OURS: speculative_decode(target, drafter, num_draft_tokens),
        THEIRS: transformers_decode(module, target.eos_token_ids, **arguments),
    }
    timings = time_interleaved(
        decoders,
        [prompt.token_ids for prompt in prompts],
        max_new_tokens=max_new_tokens,
        num_repeats=NUM_REPEATS,
    )
    pairs = zip(timings[OURS][0], timings[THEIRS][0], strict=True)
    return RivalResult(
        drafter=facts.name,
        suite=suite,
        program=f"transformers, {str(module.dtype).removeprefix('torch.')}",
        num_draft_tokens=num_draft_tokens,
        num_prompts=len(prompts),
        num_identical=sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs),
        ms_per_token=_ms_per_token(timings[OURS]),
        rival_ms_per_token=_ms_per_token(timings[THEIRS]),
    )


def _arguments(
    facts: DrafterFacts, target: Target, num_draft_tokens: int
) -> Mapping[str, Any] | None:
    """What `generate` needs to draft with this drafter; None if it cannot."""
    if facts.kind == "prompt_lookup":
        return {"prompt_lookup_num_tokens": num_draft_tokens}
    if facts.kind != "causal_lm" or facts.folder is None:
        return None
    assistant = load_module(facts.folder, dtype="auto", device=target.model.device)
    settings = assistant.generation_config
    settings.num_assistant_tokens = num_draft_tokens
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0
    return {"assistant_model": assistant}


def _ms_per_token(repeats: Sequence[Sequence[Timing]]) -> float:
    seconds = [median(t.seconds for t in of_prompt) for of_prompt in zip(*repeats, strict=True)]
    return 1000 * sum(seconds) / sum(len(timing.token_ids) for timing in repeats[0])
