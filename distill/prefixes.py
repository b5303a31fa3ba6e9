"""Answers that are begun already: places where a drafter failed, for the target to go on from.

`python -m eval` writes them as failures.jsonl: the prompt and the target's own answer up to the
token that the drafter got wrong. A drafter that is trained on what follows there learns what it
lacked. They come from evaluation prompts, so a run that trains on them evaluates on others.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from distill.prompt import Prompt, make_prompt
from distill.rows import DatasetConfig, Row, read_rows
from distill.templates import ChatTemplate

SOURCE = "prefixes"
_FILE = "failures.jsonl"
_FORM = "expected what python -m eval writes (failures.jsonl): token_ids and, to check them, tail"


def read_prefixes(path: Path, template: ChatTemplate) -> list[Prompt]:
    """The prefixes of a failures.jsonl, or of the evaluation or run folder that holds it.

    Raises:
        ValueError: if there is no such file, or for a line (named) that another tokenizer wrote.
    """
    found = next(
        (one for one in (path, path / _FILE, path / "eval" / _FILE) if one.is_file()), None
    )
    if found is None:
        raise ValueError(f"prompts.prefixes={path}: no such file, and no folder with {_FILE}")
    prefixes = [_prefix(row, template) for row in read_rows(DatasetConfig(path=str(found)))]
    if not prefixes:
        raise ValueError(
            f"{found} holds no prefixes: the drafter failed nowhere in that evaluation"
        )
    return prefixes


def without_prompts(
    prefixes: Sequence[Prompt], prompts: Iterable[Prompt], template: ChatTemplate
) -> list[Prompt]:
    """The prefixes of other prompts than these, compared by their tokens."""
    begun = {tuple(template.prompt_ids(prompt)) for prompt in prompts}
    lengths = sorted({len(ids) for ids in begun})
    return [prefix for prefix in prefixes if not _begins_with(prefix, begun, lengths)]


def prompts_begun(
    prompts: Iterable[Prompt], prefixes: Sequence[Prompt], template: ChatTemplate
) -> list[Prompt]:
    """Those of the prompts that a prefix begins with, and those about the same thing."""
    candidates = list(prompts)
    begun = [
        prompt
        for prompt, ids in ((p, tuple(template.prompt_ids(p))) for p in candidates)
        if any(prefix.token_ids[: len(ids)] == ids for prefix in prefixes)
    ]
    things = {prompt.about for prompt in begun if prompt.about}
    return begun + [p for p in candidates if p.about in things and p not in begun]


def _begins_with(
    prefix: Prompt, begun: Collection[tuple[int, ...]], lengths: Sequence[int]
) -> bool:
    return any(prefix.token_ids[:length] in begun for length in lengths)


def _prefix(row: Row, template: ChatTemplate) -> Prompt:
    match row.value:
        case {"token_ids": [int(), *_] as token_ids} if all(isinstance(i, int) for i in token_ids):
            record: dict[str, Any] = row.value
        case _:
            raise ValueError(f"{row.place}: {_FORM}")
    tokenizer = template.tokenizer
    if max(token_ids) >= len(tokenizer) or not _ends_as_noted(record, tokenizer):
        raise ValueError(
            f"{row.place}: these token ids are of another tokenizer than the target's (their end "
            f"was {json.dumps(record.get('tail'))}): take the failures of a drafter of this target"
        )
    about = f"{record.get('suite', '')}/{record.get('prompt_id', '')}"
    return make_prompt(SOURCE, (), token_ids=tuple(token_ids), about=about)


def _ends_as_noted(record: dict[str, Any], tokenizer: Any) -> bool:
    tail = record.get("tail")
    if not isinstance(tail, str):
        return True
    # The noted end is that of some tokens; how many is the evaluation's business.
    return tokenizer.decode(record["token_ids"]).endswith(tail.lstrip("\ufffd"))
