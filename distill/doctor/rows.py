"""What the doctor looks at: prompts that are still to be answered, or answers that are there."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distill.answered_turns import answered_turn
from distill.answers.config import AnswersConfig
from distill.answers.dataset import AnswerSet
from distill.answers.shards import GIVEN
from distill.prompt import Prompt, asked, user_texts
from distill.prompts import PromptSets
from distill.templates import ChatTemplate


@dataclass(frozen=True)
class Row:
    """One row of training.

    Attributes:
        token_ids: prompt and, where there is one, answer.
        prompt_length: tokens that carry no loss.
        text: what users say in it.
    """

    id: str
    source: str
    token_ids: list[int]
    prompt_length: int
    text: str
    is_given: bool = False

    @property
    def num_trained(self) -> int:
        return len(self.token_ids) - self.prompt_length


@dataclass(frozen=True)
class Examined:
    """All rows.

    Attributes:
        are_answered: whether the rows have their answers, or the target is still to write them.
        rows: those that would be trained on.
        too_long: ids that are left out for their length.
        unusable: id and reason of rows that no answer can be found in.
    """

    are_answered: bool
    rows: list[Row]
    too_long: list[str] = field(default_factory=list)
    unusable: list[tuple[str, str]] = field(default_factory=list)


def rows_of_prompts(
    sets: PromptSets, template: ChatTemplate, config: AnswersConfig, max_positions: int
) -> Examined:
    """The training prompts, rendered, with the answers that their data sets bring."""
    room = min(config.max_prompt_tokens, max_positions - config.max_new_tokens)
    found = Examined(any(prompt.answer is not None for prompt in sets.train), [])
    for prompt in sets.train:
        try:
            row = _row(prompt, template, config.max_new_tokens)
        except ValueError as error:
            found.unusable.append((prompt.id, str(error)))
            continue
        if 0 < row.prompt_length <= room:
            found.rows.append(row)
        else:
            found.too_long.append(prompt.id)
    return found


def rows_of_answers(folder: Path, template: ChatTemplate) -> Examined:
    """The answers of a folder.

    Raises:
        ValueError: if it holds none, or is damaged.
    """
    special = template.special
    rows = []
    for answer in AnswerSet.read(folder).answers:
        ids = answer.token_ids.tolist()
        prompt = [index for index in ids[: answer.prompt_length] if index not in special]
        text = str(template.tokenizer.decode(prompt))
        is_given = answer.temperature == GIVEN
        rows.append(Row(answer.id, answer.source, ids, answer.prompt_length, text, is_given))
    return Examined(True, rows)


def as_prompts(rows: Sequence[Row]) -> list[Prompt]:
    """The rows as prompts, to compare them with those of the evaluation."""
    return [asked(row.source, row.text) for row in rows]


def _row(prompt: Prompt, template: ChatTemplate, max_new_tokens: int) -> Row:
    text = "\n".join(user_texts(prompt))
    if prompt.answer is None:
        ids = template.prompt_ids(prompt)
        return Row(prompt.id, prompt.source, ids, len(ids), text)
    turn = answered_turn(template, prompt)
    ids = [*turn.prompt_ids, *turn.answer_ids[:max_new_tokens]]
    return Row(prompt.id, prompt.source, ids, len(turn.prompt_ids), text, is_given=True)
