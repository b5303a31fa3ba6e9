"""Whether the target's chat template does what serving and training need of it."""

from collections.abc import Iterator, Sequence

from distill.answered_turns import answered_turn
from distill.doctor.finding import Finding, Level
from distill.prompt import asked, make_prompt
from distill.templates import ChatTemplate
from specdec_runtime.chat import SYSTEM_PROMPT, chat_text

_QUESTION = {"role": "user", "content": "What is that?"}
_THOUGHT = {"role": "assistant", "content": "<think>\nI wonder.\n</think>\n\nNothing."}
_REPLY = {"role": "assistant", "content": "Nothing."}


def check_template(template: ChatTemplate, eos_token_ids: Sequence[int]) -> Iterator[Finding]:
    """Findings on the template alone, whatever the data."""
    if not template.exists:
        yield Finding(
            Level.warning,
            "no_template",
            "the target has no chat template, so prompts are encoded as they are",
            "right for a base model; otherwise give its tokenizer the template it is served with",
        )
        return
    yield from _check_beginning(template)
    yield from _check_answer(template, eos_token_ids)
    yield from _check_options(template)


def _check_beginning(template: ChatTemplate) -> Iterator[Finding]:
    tokenizer, bos = template.tokenizer, template.tokenizer.bos_token_id
    ids = template.prompt_ids(asked("doctor", "Hello"))
    plain = list(tokenizer("Hello").input_ids)
    adds_bos = bos is not None and plain[:1] == [bos]
    if bos is not None and ids[:2] == [bos, bos]:
        yield Finding(
            Level.error,
            "doubled_bos",
            f"the template writes {tokenizer.bos_token!r} twice at the beginning",
            "remove one from the template; the target has never seen two",
        )
    elif adds_bos and ids[:1] != [bos]:
        yield Finding(
            Level.warning,
            "missing_bos",
            f"the tokenizer puts {tokenizer.bos_token!r} in front of a text and the template writes "
            "none",
            "compare with how the target was trained; most templates begin with it",
        )
    elif adds_bos:
        yield Finding(
            Level.note,
            "bos_twice_as_text",
            f"template and tokenizer both write {tokenizer.bos_token!r}",
            "send servers token ids or messages, never the rendered text: they would double it",
        )


def _check_answer(template: ChatTemplate, eos_token_ids: Sequence[int]) -> Iterator[Finding]:
    options = (template.tokenizer, [_QUESTION], template.options)
    if chat_text(*options) == chat_text(*options, answered=True):
        yield Finding(
            Level.warning,
            "no_generation_prompt",
            "the template does not begin the answer (add_generation_prompt changes nothing)",
            "the target may go on as the user; use a template that opens the assistant's turn",
        )
    try:
        row = answered_turn(template, make_prompt("doctor", [_QUESTION], answer=_THOUGHT))
    except ValueError as error:
        yield Finding(
            Level.error, "no_answer", f"no answer can be found in a conversation ({error})"
        )
        return
    end = row.answer_ids[-1]
    if end not in template.special:
        yield Finding(
            Level.warning,
            "no_turn_end",
            "the template closes an answer with no special token",
            "a drafter can not learn where answers end; use a template that marks it",
        )
    elif end not in eos_token_ids:
        yield Finding(
            Level.error,
            "turn_end_is_no_stop",
            f"the template ends an answer with {template.tokenizer.decode([end])!r}, which is not "
            f"among the target's end-of-text ids {list(eos_token_ids)}",
            "add its id to eos_token_id of the target's generation_config.json, or the target runs "
            "on behind its answers",
        )
    if template.has_markers:
        yield Finding(
            Level.note, "markers", "the template marks what an assistant writes; these marks decide"
        )
    # The thinking of an answered turn is looked for in the prompt of the next one.
    later = chat_text(template.tokenizer, [_QUESTION, _THOUGHT, _QUESTION], template.options)
    if "I wonder." not in later:
        yield Finding(
            Level.note,
            "rewrites_history",
            "the template takes the thinking out of earlier answers",
            "each turn is a row of its own, with the history that is seen when it is served",
        )


def _check_options(template: ChatTemplate) -> Iterator[Finding]:
    for name in template.options:
        if name != SYSTEM_PROMPT and name not in template.source:
            yield Finding(
                Level.warning,
                "unused_option",
                f"the template never reads target.template_options.{name}",
                "check its name in the model card; as it is, it changes nothing",
            )
    if SYSTEM_PROMPT in template.options:
        chat = [_QUESTION, _REPLY, _QUESTION]
        if str(template.options[SYSTEM_PROMPT]) not in chat_text(
            template.tokenizer, chat, template.options
        ):
            yield Finding(
                Level.error,
                "lost_system_prompt",
                "the template does not show the system prompt",
                "this target takes none; put it in front of the user's text where it is served",
            )
    if "strftime_now" in template.source:
        yield Finding(
            Level.warning,
            "dated",
            "the template writes today's date, so prompts differ from day to day",
            "fix the date by the template's own option if it has one (date_string), or accept "
            "answers under several dates",
        )
