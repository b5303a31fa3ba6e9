"""Conversations of several turns: the target answers each turn on what it answered before.

Turn by turn, all conversations at once. A later turn is a prompt like any other, with an id that
follows from its messages, so a job that is interrupted goes on where it was. A conversation ends
early where an answer was cut off at its maximal length (nobody replies to half a sentence), or where
the template would show that answer in another way than the target wrote it.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from distill.answered_turns import answered_turn
from distill.answers.authors import Author
from distill.answers.config import AnswersConfig
from distill.answers.dataset import AnswerSet
from distill.answers.shards import Answer
from distill.answers.write import collect_answers
from distill.progress import Progress
from distill.prompt import Message, Prompt, make_prompt
from distill.templates import ChatTemplate

log = logging.getLogger(__name__)


def collect_turns(
    author: Author,
    prompts: Sequence[Prompt],
    config: AnswersConfig,
    folder: Path,
    *,
    progress: Progress | None = None,
    wait: bool = False,
) -> AnswerSet:
    """The answers to the prompts, and to what is asked after them.

    Budgets of tokens and time are shared out by the number of prompts that each turn has.

    Arguments and errors as `collect_answers`.
    """
    numbers = _numbers(prompts)
    answers = _one_turn(author, prompts, config, folder, numbers, progress, wait)
    if len(numbers) == 1:
        return answers
    ids, current = [answer.id for answer in answers.answers], list(prompts)
    for turn in range(1, len(numbers)):
        current = _next_prompts(current, answers.answers, author.template, config)
        left = _left(config, AnswerSet.read(folder, order=ids).num_tokens)
        if not current or left.max_tokens == 0:
            break
        answers = _one_turn(author, current, left, folder, numbers[turn:], progress, wait)
        ids += [answer.id for answer in answers.answers]
    return AnswerSet.read(folder, order=ids)


def _one_turn(
    author: Author,
    prompts: Sequence[Prompt],
    config: AnswersConfig,
    folder: Path,
    numbers: list[int],
    progress: Progress | None,
    wait: bool,
) -> AnswerSet:
    share = numbers[0] / sum(numbers)
    tokens, seconds = config.max_tokens, config.max_seconds
    if share < 1:
        tokens = None if tokens is None else max(1, round(tokens * share))
        seconds = None if seconds is None else seconds * share
    budgeted = replace(config, max_tokens=tokens, max_seconds=seconds)
    return collect_answers(author, prompts, budgeted, folder, progress=progress, wait=wait)


def _numbers(prompts: Sequence[Prompt]) -> list[int]:
    """How many prompts there are at most of each turn."""
    longest = max((len(prompt.later) for prompt in prompts), default=0)
    return [sum(len(prompt.later) >= turn for prompt in prompts) for turn in range(longest + 1)]


def _left(config: AnswersConfig, num_tokens: int) -> AnswersConfig:
    if config.max_tokens is None:
        return config
    return replace(config, max_tokens=max(config.max_tokens - num_tokens, 0))


def _next_prompts(
    prompts: Sequence[Prompt],
    answers: Sequence[Answer],
    template: ChatTemplate,
    config: AnswersConfig,
) -> list[Prompt]:
    """What is asked next in each conversation that goes on."""
    answered = {answer.id: answer for answer in answers}
    found, num_unlike = [], 0
    for prompt in prompts:
        answer = answered.get(prompt.id)
        if not prompt.later or answer is None or answer.num_tokens >= config.max_new_tokens:
            continue
        message = _as_message(template, prompt, answer)
        if message is None:
            num_unlike += 1
            continue
        messages = (*prompt.messages, message, *prompt.later[0])
        found.append(
            make_prompt(
                prompt.source,
                messages,
                tools=prompt.tools,
                about=prompt.about,
                later=prompt.later[1:],
            )
        )
    if num_unlike:
        log.warning(
            "%d conversations end early: their template does not show an answer as the target "
            "wrote it",
            num_unlike,
        )
    return found


def _as_message(template: ChatTemplate, prompt: Prompt, answer: Answer) -> Message | None:
    """An answer as the message that a client would send back; None if it would not be that answer."""
    tokenizer = template.tokenizer
    written = answer.token_ids[answer.prompt_length :].tolist()
    said = str(tokenizer.decode(written, skip_special_tokens=True))
    message = {"role": "assistant", "content": said}
    if not template.exists:
        return message
    try:
        shown = answered_turn(template, replace(prompt, answer=message)).answer_ids
    except ValueError:
        return None
    same = _letters(str(tokenizer.decode(shown))) == _letters(str(tokenizer.decode(written)))
    return message if same else None


def _letters(text: str) -> str:
    return "".join(text.split())
