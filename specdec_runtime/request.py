"""What a `generate` call asks for, checked before any forward pass.

Argument names are those of transformers' `generate`. Whatever is not supported is refused with
what to do about it; nothing is ignored.
"""

import difflib
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any

from transformers import StoppingCriteria, StoppingCriteriaList

from specdec_runtime.sampling_settings import SamplingSettings, is_whole_number
from specdec_runtime.stopping import Stopping
from specdec_runtime.target import Target
from specdec_runtime.text import require_unicode

# Arguments of transformers' `generate` that mean another algorithm, and the value that is no-op.
_ONE_SEQUENCE = {"num_beams": 1, "num_return_sequences": 1, "num_beam_groups": 1}
# Those that have another place here, and which.
_ELSEWHERE = {
    "assistant_model": "give SpeculativeDecoder a drafter",
    "prompt_lookup_num_tokens": 'give SpeculativeDecoder the drafter "lookup" of load_drafter',
    "assistant_early_exit": 'give SpeculativeDecoder the drafter "early_exit" of load_drafter',
    "num_assistant_tokens": "give SpeculativeDecoder num_draft_tokens",
    "max_length": "give max_new_tokens, which leaves the prompt out",
    "logits_processor": "give logits_processors, a list",
    "generation_config": "give its settings by name",
    "cache_implementation": "the loop owns its cache; load_target with engine='compiled' has "
    "buffers of fixed size",
    "past_key_values": "the loop owns its cache; give the whole prompt",
    "use_cache": "the loop always caches",
    "attention_mask": "prompts are lists of their own lengths, without padding",
    "inputs_embeds": "prompts are texts or token ids",
    "pad_token_id": "prompts are lists of their own lengths, without padding",
    "no_repeat_ngram_size": "give logits_processors a NoRepeatNGramLogitsProcessor",
    "suppress_tokens": "give logit_bias, -inf for each of them",
    "max_time": "give stopping_criteria a MaxTimeCriteria",
    "streamer": "iterate over stream(...), or give on_tokens",
    "return_dict_in_generate": "the result always has everything",
    "pixel_values": "the target reads text alone",
    "input_features": "the target reads text alone",
}
_SAMPLING = {setting.name for setting in fields(SamplingSettings)}


@dataclass(frozen=True)
class Request:
    """Checked arguments of one call."""

    prompts: list[list[int]]
    budgets: list[int]  # most new tokens per row
    is_context_bound: list[bool]  # whether positions rather than max_new_tokens set the budget
    settings: SamplingSettings
    stopping: Stopping
    eos_token_ids: tuple[int, ...]


def check_request(
    target: Target,
    prompts: Sequence[Sequence[int]] | Sequence[str],
    *,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None,
    stop_strings: str | Sequence[str] | None,
    stopping_criteria: Sequence[StoppingCriteria] | None,
    sampling: Mapping[str, Any],
) -> Request:
    """Everything a decoding needs, or a ValueError that says what to change."""
    if not is_whole_number(max_new_tokens) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens!r}, expected a number of at least 1")
    _check_list_of_prompts(prompts)
    settings = _checked_settings(sampling, target)
    if settings.min_new_tokens > max_new_tokens:
        raise ValueError(
            f"min_new_tokens={settings.min_new_tokens} contradicts max_new_tokens="
            f"{max_new_tokens}: lower the one or raise the other"
        )
    encoded = [_checked_prompt(target, prompt, row) for row, prompt in enumerate(prompts)]
    if not encoded:
        raise ValueError("no prompts were given, expected at least one")
    room = [target.model.max_positions - len(prompt) for prompt in encoded]
    eos = target.eos_token_ids if eos_token_id is None else _checked_ends(eos_token_id, target)
    strings = _checked_stop_strings(stop_strings, target)
    criteria = [] if stopping_criteria is None else stopping_criteria
    if not isinstance(criteria, Sequence) or not all(map(callable, criteria)):
        raise ValueError(
            f"stopping_criteria is {criteria!r}, expected a list of StoppingCriteria objects"
        )
    return Request(
        prompts=encoded,
        budgets=[min(int(max_new_tokens), left) for left in room],
        is_context_bound=[left < max_new_tokens for left in room],
        settings=settings,
        stopping=Stopping(
            eos_token_ids=eos,
            stop_strings=strings,
            criteria=StoppingCriteriaList(criteria),
            tokenizer=target.tokenizer,
        ),
        eos_token_ids=eos,
    )


def _checked_settings(sampling: Mapping[str, Any], target: Target) -> SamplingSettings:
    given = dict(sampling)
    for name, neutral in _ONE_SEQUENCE.items():
        if given.pop(name, neutral) != neutral:
            raise ValueError(
                f"{name}={sampling[name]}: speculative decoding keeps one sequence a prompt; "
                f"drop {name}, or repeat the prompt"
            )
    do_sample = given.pop("do_sample", None)
    if do_sample not in (None, True, False):
        raise ValueError(f"do_sample is {do_sample!r}, expected True, False or nothing")
    for name in given:
        if name in _ELSEWHERE:
            raise ValueError(f"{name} is no argument of generate here: {_ELSEWHERE[name]}")
        if name not in _SAMPLING:
            near = difflib.get_close_matches(name, _SAMPLING, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"unknown argument {name!r} of generate{hint}")
    if do_sample and "temperature" not in given:
        given["temperature"] = 1.0
    settings = SamplingSettings(**given)
    if do_sample is not None:
        temperatures = settings.temperature
        values = temperatures if isinstance(temperatures, Sequence) else [temperatures]
        if any(bool(value) != bool(do_sample) for value in values):
            raise ValueError(
                f"do_sample={do_sample} contradicts temperature={settings.temperature}: "
                "temperature 0 is greedy, anything else samples; drop do_sample"
            )
    if target.unused_token_ids:
        never = dict.fromkeys(target.unused_token_ids, float("-inf"))
        settings = replace(settings, logit_bias={**(settings.logit_bias or {}), **never})
    return settings


def _checked_prompt(target: Target, prompt: Any, row: int) -> list[int]:
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise ValueError("text prompts need the target's tokenizer: use load_target, or ids")
        require_unicode(prompt)
        prompt = target.tokenizer(prompt).input_ids
    try:
        if isinstance(prompt, bytes | bytearray | Set):
            raise TypeError
        ids = [operator.index(token) for token in prompt]
    except TypeError:
        kind = type(prompt).__name__
        raise ValueError(f"prompt {row} is a {kind}: expected text or a list of ids") from None
    if not ids:
        raise ValueError(f"prompt {row} is empty: give at least one token")
    # The rows of a padded head have embeddings that mean nothing, and a drafter may lack them.
    wrong = [token for token in ids if not 0 <= token < target.real_vocab_size]
    if wrong:
        raise ValueError(
            f"prompt {row} holds token id {wrong[0]}, the target knows 0 to "
            f"{target.real_vocab_size - 1}: encode it with the target's tokenizer"
        )
    if len(ids) >= target.model.max_positions:
        raise ValueError(
            f"prompt {row} has {len(ids)} tokens, the target takes {target.model.max_positions} "
            "with the answer: shorten it"
        )
    return ids


def _check_list_of_prompts(prompts: object) -> None:
    if isinstance(prompts, str):
        raise ValueError("prompts is one text, expected a list of prompts: put it in brackets")
    if isinstance(prompts, Mapping):
        raise ValueError(
            f"prompts is a {type(prompts).__name__}, expected a list of prompts: what a tokenizer "
            'returns has them under "input_ids"'
        )
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts is {prompts!r}, expected a list of texts or of lists of ids")


def _checked_ends(given: Any, target: Target) -> tuple[int, ...]:
    """The ids of `eos_token_id`."""
    try:
        ids = tuple(map(operator.index, given if isinstance(given, Iterable) else [given]))
    except TypeError:
        raise ValueError(
            f"eos_token_id is {given!r}, expected a token id or a list of them"
        ) from None
    for token in ids:
        if not 0 <= token < target.model.vocab_size:
            raise ValueError(
                f"eos_token_id names {token}, the target knows 0 to "
                f"{target.model.vocab_size - 1}: [] decodes without any end"
            )
    return ids


def _checked_stop_strings(given: Any, target: Target) -> list[str]:
    strings = [given] if isinstance(given, str) else given or []
    if not isinstance(strings, Iterable) or not all(isinstance(one, str) for one in strings):
        raise ValueError(f"stop_strings is {given!r}, expected a text or a list of them")
    if strings and target.tokenizer is None:
        raise ValueError("stop_strings need the target's tokenizer: use load_target")
    if "" in strings:
        raise ValueError("stop_strings holds an empty string, which every text contains")
    return list(strings)
