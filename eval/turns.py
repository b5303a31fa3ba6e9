"""Later turns of a conversation: each continues from the target's own greedy answer.

So every method sees the same context, whatever its own texts are, and a second turn's acceptance is
that of a real second turn. (Where each method continues its own answer, as Spec-Bench's script has
it, contexts drift apart at the first near-tie.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from eval.acceptance import measure_acceptance
from eval.progress import Stage, terminal_stage
from eval.suites import Question, encode_messages
from specdec_runtime.target import Target


def with_later_turns(
    questions: Sequence[Question],
    target: Target,
    *,
    num_turns: int,
    max_new_tokens: int,
    most: int,
    template_options: Mapping[str, Any] | None = None,
    stage: Stage = terminal_stage,
) -> list[Question]:
    """The questions, each followed by its later turns up to `num_turns`, as chats of their own.

    Args:
        num_turns: 1 leaves the questions as they are.
        max_new_tokens: length of the answers in between.
        most: questions a suite that are wanted; of a larger suite, evenly spaced ones are taken
            before the target has to answer anything.
    """
    if num_turns == 1:
        return list(questions)
    conversations = [[question] for question in _chosen(questions, most, num_turns)]
    for number in range(2, num_turns + 1):
        going_on = [turns for turns in conversations if turns[-1].later_turns]
        if not going_on:
            break
        last = [turns[-1] for turns in going_on]
        continued = _continued(last, target, max_new_tokens, template_options, stage)
        for turns, question in zip(going_on, continued, strict=True):
            turns.append(replace(question, id=f"{turns[0].id}/turn {number}"))
    return [question for turns in conversations for question in turns]


def _chosen(questions: Sequence[Question], most: int, num_turns: int) -> list[Question]:
    """Of each suite about as many questions as give `most` prompts with their later turns."""
    suites: dict[str, list[Question]] = {}
    for question in questions:
        suites.setdefault(question.suite, []).append(question)
    chosen = []
    for members in suites.values():
        turns = max(min(num_turns, 1 + len(question.later_turns)) for question in members)
        number = min(len(members), -(-most // turns))
        chosen += [members[i * len(members) // number] for i in range(number)]
    return chosen


def _continued(
    questions: Sequence[Question],
    target: Target,
    max_new_tokens: int,
    template_options: Mapping[str, Any] | None,
    stage: Stage,
) -> list[Question]:
    """The next turn of each question, behind the target's answer."""
    chats = [question.messages or [] for question in questions]
    encoded = [encode_messages(chat, target.tokenizer, template_options) for chat in chats]
    with stage("answers of the target between turns", len(questions)) as advance:
        answers = measure_acceptance(
            target,
            None,
            encoded,
            num_draft_tokens=0,
            max_new_tokens=max_new_tokens,
            on_prompts=advance,
        ).token_ids
    return [
        replace(
            question,
            messages=[
                *chat,
                {
                    "role": "assistant",
                    "content": target.tokenizer.decode(answer, skip_special_tokens=True),
                },
                {"role": "user", "content": question.later_turns[0]},
            ],
            later_turns=question.later_turns[1:],
        )
        for question, chat, answer in zip(questions, chats, answers, strict=True)
    ]
