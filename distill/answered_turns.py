"""What is trained on in a conversation that has its answers already: one row a turn.

A row holds the ids that the target sees when that turn is served, then the ids that it would have
had to write there to give this answer. Rendering the whole conversation once is not the same: many
templates rewrite history (the thinking of earlier turns is taken out), and some begin the answer
themselves. So each turn is rendered as it is served, and its answer is found

1. behind the prompt, where the rendered answer begins with it; the template's generation markers
   say where the answer ends, and without any, its last special token does;
2. otherwise from its own parts: thinking, text, and the end of a turn as this template writes it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from distill.prompt import Message, Prompt
from distill.templates import MARK, ChatTemplate

_THINK, _END_THINK = "<think>", "</think>"
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class AnsweredTurn(NamedTuple):
    """prompt_ids: not trained on. answer_ids: trained on, the end of the turn included."""

    prompt_ids: list[int]
    answer_ids: list[int]


def answered_turn(template: ChatTemplate, prompt: Prompt) -> AnsweredTurn:
    """The row of a prompt that has an answer.

    Raises:
        ValueError: if the template shows no way to tell what the target would have written.
    """
    assert prompt.answer is not None, prompt.id
    if prompt.text or not template.exists:
        return _without_template(template, prompt, prompt.answer)
    prompt_ids = template.prompt_ids(prompt)
    whole, mask = template.answered_ids(prompt, prompt.answer)
    if whole[: len(prompt_ids)] == prompt_ids:
        return _behind_prompt(template, prompt_ids, whole, mask)
    text, before = template.answered_text(prompt, prompt.answer), template.prompt_text(prompt)
    if text.startswith(before):  # only the tokens around the boundary differ
        written = template.encode(text[len(before) :])
    else:
        written = template.encode(_written_text(template, prompt, prompt.answer, before, text))
    return AnsweredTurn(prompt_ids, _up_to_end(template, written))


def _without_template(template: ChatTemplate, prompt: Prompt, answer: Message) -> AnsweredTurn:
    """Plain text: the answer is what the tokens of the whole have behind those of the prompt."""
    tokenizer = template.tokenizer
    before = template.prompt_ids(prompt)
    separator = "" if prompt.text else "\n\n"
    start = prompt.text or "\n\n".join(str(m["content"]) for m in prompt.messages)
    whole = list(tokenizer(start + separator + str(answer["content"])).input_ids)
    shared = _shared_length(before, whole)
    if not prompt.text and tokenizer.eos_token_id is not None:
        whole.append(tokenizer.eos_token_id)
    return AnsweredTurn(whole[:shared], whole[shared:])


def _behind_prompt(
    template: ChatTemplate, prompt_ids: list[int], whole: list[int], mask: list[int]
) -> AnsweredTurn:
    start = len(prompt_ids)
    if not template.has_markers:
        return AnsweredTurn(prompt_ids, _up_to_end(template, whole[start:]))
    if not any(mask[start:]):
        raise ValueError(
            "the chat template has generation markers and marks nothing of the last answer: it "
            "would train on nothing; repair the template, or remove its markers"
        )
    end = len(mask) - mask[::-1].index(1)
    first = end - 1
    while first > start and mask[first - 1]:
        first -= 1
    if (
        end < len(whole)
        and whole[end - 1] not in template.special
        and whole[end] in template.special
    ):
        end += 1  # the target writes the end of its turn, whoever marks it
    return AnsweredTurn(whole[:first], whole[first:end])


def _up_to_end(template: ChatTemplate, written: Sequence[int]) -> list[int]:
    """Without what a template writes behind the end of a turn; the target stops there."""
    last = max((i for i, token in enumerate(written) if token in template.special), default=None)
    return list(written if last is None else written[: last + 1])


def _written_text(
    template: ChatTemplate, prompt: Prompt, answer: Message, before: str, text: str
) -> str:
    """What the target writes where its prompt, as served, begins the answer already.

    Args:
        before: the prompt. text: the conversation, in which the answer begins in another way.
    """
    begun = before[_shared_length(before, text) :]
    thinking, content = _thinking_of(answer)
    closing = template.answered_text(prompt, {"role": "assistant", "content": MARK})
    end = closing.partition(MARK)[2]
    if MARK not in closing or not begun:
        raise ValueError(
            "the chat template changes what stands in front of an answer: the data set's own "
            "answers can not be trained on; use prompts.turns=each"
        )
    if _THINK not in begun or _END_THINK in begun:
        return content + end
    if not thinking:
        raise ValueError(
            f"the target begins its answers with {_THINK}, and this answer brings no thinking: use "
            "prompts.turns=each, so that the target writes its own, or switch thinking off in "
            "target.template_options"
        )
    return f"{thinking}\n{_END_THINK}\n\n{content}{end}"


def _thinking_of(answer: Message) -> tuple[str, str]:
    """(thinking, what is said) of an answer, wherever the thinking is."""
    content = str(answer["content"])
    given = next((str(answer[key]) for key in _REASONING_KEYS if answer.get(key)), "")
    if _END_THINK in content:
        inline, _, content = content.partition(_END_THINK)
        given = given or inline.replace(_THINK, "", 1)
    return given.strip("\n"), content.lstrip("\n")


def _shared_length(one: Sequence[object], other: Sequence[object]) -> int:
    """How long both begin alike."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
