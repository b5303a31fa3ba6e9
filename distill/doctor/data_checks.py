"""What is wrong with the rows themselves."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from distill.doctor.finding import Finding, Level
from distill.doctor.rows import Examined, Row, as_prompts
from distill.overlap import Overlap, find_overlaps
from distill.prompt import Prompt, letters
from distill.templates import ChatTemplate

_FEW_TOKENS = 20_000  # a two-layer drafter still gains with every doubling far beyond this
_MANY = 0.05  # share of rows from which a fault is worth a word
_MANY_CUT = 0.5
_LOOP = 0.3  # share of distinct three-token sequences below which an answer goes round in circles
_LOOP_TOKENS = 30


def check_rows(
    examined: Examined, template: ChatTemplate, eos_token_ids: Sequence[int]
) -> Iterator[Finding]:
    """Findings on lengths, masks, ends and repetitions."""
    yield from _check_left_out(examined)
    rows = examined.rows
    if not rows:
        return
    yield from _check_beginnings(rows, template)
    yield from _check_special_text(rows, template)
    repeated = len(rows) - len({letters(row.text) for row in rows})
    if repeated and not any(row.is_given for row in rows):
        yield Finding(
            Level.warning,
            "duplicates",
            f"{repeated} of {len(rows)} prompts ask what another one asks, up to case and spacing",
            "remove them, unless several answers to one prompt are wanted",
        )
    if examined.are_answered:
        yield from _check_masks(rows)
        yield from _check_answers(rows, eos_token_ids)


def check_overlap(
    examined: Examined,
    evaluation: Mapping[str, Sequence[Prompt]],
    template: ChatTemplate,
    left_out: Sequence[Overlap],
) -> Iterator[Finding]:
    """Evaluation prompts in what is trained on; those that were left out already are a note."""
    if left_out:
        exact = sum(one.is_exact for one in left_out)
        yield Finding(
            Level.note,
            "overlap_left_out",
            f"{len(left_out)} prompts are in the evaluation ({exact} exactly, "
            f"{len(left_out) - exact} nearly) and are not trained on, such as {left_out[0].train_id}, "
            f"which is {left_out[0].similarity:.0%} of {left_out[0].evaluation_id}",
        )
        return
    asked = {tuple(template.prompt_ids(p)): p.id for suite in evaluation.values() for p in suite}
    exact_ids = [
        row.id for row in examined.rows if tuple(row.token_ids[: row.prompt_length]) in asked
    ]
    near = find_overlaps(as_prompts(examined.rows), evaluation)
    if exact_ids:
        yield Finding(
            Level.error,
            "overlap",
            f"{len(exact_ids)} answers are to prompts of the evaluation, such as {exact_ids[0]}",
            "leave them out: what is measured on them is memory",
        )
    elif near:
        yield Finding(
            Level.warning,
            "near_overlap",
            f"{len(near)} prompts are nearly prompts of the evaluation, such as one that is "
            f"{near[0].similarity:.0%} of {near[0].evaluation_id}",
            "leave them out, or evaluate on other prompts",
        )
    elif evaluation:
        suites = ", ".join(evaluation)
        yield Finding(Level.note, "no_overlap", f"no prompt of {suites} is trained on")


def _check_left_out(examined: Examined) -> Iterator[Finding]:
    total = len(examined.rows) + len(examined.too_long) + len(examined.unusable)
    none_left = not examined.rows
    if examined.too_long:
        yield Finding(
            Level.error if none_left else Level.warning,
            "too_long",
            f"{len(examined.too_long)} of {total} prompts are too long and left out, such as "
            f"{examined.too_long[0]}",
            "raise answers.max_prompt_tokens, or lower answers.max_new_tokens if the target's "
            "context is what limits them",
        )
    if examined.unusable:
        name, reason = examined.unusable[0]
        yield Finding(
            Level.error if none_left else Level.warning,
            "unusable",
            f"{len(examined.unusable)} of {total} rows are left out, such as {name} ({reason})",
            "repair them, or have the target answer (prompts.turns=each)",
        )


def _check_beginnings(rows: Sequence[Row], template: ChatTemplate) -> Iterator[Finding]:
    bos = template.tokenizer.bos_token_id
    doubled = [row.id for row in rows if bos is not None and row.token_ids[:2] == [bos, bos]]
    if doubled:
        yield Finding(
            Level.error,
            "doubled_bos_in_rows",
            f"{len(doubled)} of {len(rows)} rows begin with two beginning-of-text tokens, such as "
            f"{doubled[0]}",
            "the text was rendered and then encoded with special tokens added: give messages, not "
            "rendered text",
        )


def _check_special_text(rows: Sequence[Row], template: ChatTemplate) -> Iterator[Finding]:
    marks = [str(template.tokenizer.decode([index])) for index in sorted(template.special)]
    holders = [row.id for row in rows if any(mark and mark in row.text for mark in marks)]
    if holders and template.exists:
        yield Finding(
            Level.warning,
            "special_text",
            f"{len(holders)} of {len(rows)} prompts hold a special token as text, such as "
            f"{holders[0]}",
            "the target reads it as the end of a turn: remove it, unless your servers see it too",
        )


def _check_masks(rows: Sequence[Row]) -> Iterator[Finding]:
    nothing = [row.id for row in rows if row.num_trained < 1]
    everything = [row.id for row in rows if row.prompt_length < 1]
    if nothing:
        yield Finding(
            Level.error if len(nothing) == len(rows) else Level.warning,
            "nothing_trained",
            f"{len(nothing)} of {len(rows)} rows have no token to learn from, such as {nothing[0]}",
            "they are dropped: give answers, or raise answers.max_new_tokens",
        )
    if everything:
        yield Finding(
            Level.error,
            "everything_trained",
            f"{len(everything)} of {len(rows)} rows have no prompt, such as {everything[0]}",
            "the first token can not be predicted from anything: write the answers again",
        )
    trained = sum(row.num_trained for row in rows)
    if 0 < trained < _FEW_TOKENS:
        yield Finding(
            Level.warning,
            "few_tokens",
            f"there are {trained:,} tokens to learn from",
            f"expect little below {_FEW_TOKENS:,}: give more prompts or longer answers",
        )


def _check_answers(rows: Sequence[Row], eos_token_ids: Sequence[int]) -> Iterator[Finding]:
    answered = [row for row in rows if row.num_trained > 0]
    given = sum(row.is_given for row in answered)
    if given:
        yield Finding(
            Level.warning,
            "not_the_targets",
            f"{given} of {len(answered)} answers were not written by the target",
            "acceptance is higher on its own: prompts.turns=each or last has it write them",
        )
    cut = sum(row.token_ids[-1] not in eos_token_ids for row in answered)
    if cut > _MANY_CUT * len(answered):
        yield Finding(
            Level.warning,
            "cut_off",
            f"{cut} of {len(answered)} answers are cut off before their end",
            "the drafter sees few ends of answers: raise answers.max_new_tokens",
        )
    loops = [row.id for row in answered if _goes_round(row)]
    if len(loops) > _MANY * len(answered):
        yield Finding(
            Level.warning,
            "loops",
            f"{len(loops)} of {len(answered)} answers repeat themselves over and over, such as "
            f"{loops[0]}",
            "raise answers.temperatures, or lower answers.max_new_tokens",
        )


def _goes_round(row: Row) -> bool:
    answer = row.token_ids[row.prompt_length :]
    if len(answer) < _LOOP_TOKENS:
        return False
    seen = Counter(zip(answer, answer[1:], answer[2:], strict=False))
    return len(seen) < _LOOP * (len(answer) - 2)
