"""The job: every prompt answered once, however often the job is killed and started again.

What is in a finished shard is done; everything else is written (again). Since an answer depends on
its prompt and the seed alone (writer.py), a job that was killed three times leaves the same answers
as one that was not.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from distill.answers.budget import Budget, Progress
from distill.answers.config import AnswersConfig
from distill.answers.dataset import AnswerSet
from distill.answers.manifest import claim, make_manifest
from distill.answers.shards import (
    Answer,
    remove_unfinished,
    shard_paths,
    token_numbers,
    write_shard,
)
from distill.prompts import Prompt
from distill.templates import ChatTemplate
from distill.writer import Request, Text, Writer
from specdec_runtime.file_lock import exclusive
from specdec_runtime.target import Target

log = logging.getLogger(__name__)


class _Job(NamedTuple):
    prompt: Prompt
    request: Request


def write_answers(
    target: Target,
    prompts: Sequence[Prompt],
    config: AnswersConfig,
    folder: Path,
    *,
    template: ChatTemplate | None = None,
    progress: Progress | None = None,
) -> AnswerSet:
    """Has the target answer the prompts, in their order, as far as the budget goes.

    A folder that was written with the same settings is continued. A job that has ended is never run
    again: the same prompts and budget give exactly the answers it left, whatever was added since.

    Args:
        template: how conversations are rendered; None = the tokenizer's own, without options.
        progress: called a few times a second.

    Raises:
        ValueError: for a folder of other answers, a second process on the same folder, or prompts
            that are all too long.
    """
    template = template or ChatTemplate(target.tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / ".lock", wait=False):
        claim(folder, make_manifest(target, template, config))
        remove_unfinished(folder)
        jobs = _jobs(prompts, template, config, target.model.max_positions)
        record = folder / f"job-{_job_key(jobs, config)}.json"
        if not record.exists():
            order = [job.prompt.id for job in jobs]
            done: dict[str, int] = {}
            for path in shard_paths(folder):
                done |= token_numbers(path)
            budget = Budget(config, order, done, progress)
            _write_missing(target, jobs, config, folder, budget)
            _store(record, budget.answered())
        return AnswerSet.read(folder, order=json.loads(record.read_text()))


def _jobs(
    prompts: Sequence[Prompt], template: ChatTemplate, config: AnswersConfig, max_positions: int
) -> list[_Job]:
    """The prompts that are short enough, rendered."""
    room = min(config.max_prompt_tokens, max_positions - config.max_new_tokens)
    jobs = []
    for key, prompt in enumerate({prompt.id: prompt for prompt in prompts}.values()):
        token_ids = template.render(prompt.messages)
        if 0 < len(token_ids) <= room:
            digest = hashlib.sha256(f"{config.seed}\x1f{prompt.id}".encode()).digest()
            # Two independent numbers of one hash: which temperature, which noise.
            turn, seed = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")
            temperature = config.temperatures[turn % len(config.temperatures)]
            jobs.append(_Job(prompt, Request(key, token_ids, temperature, seed)))
    if len(jobs) < len(prompts):
        log.warning(
            "%d of %d prompts are left out: repeated, or longer than %d tokens",
            len(prompts) - len(jobs),
            len(prompts),
            room,
        )
    if not jobs:
        raise ValueError(
            f"none of the {len(prompts)} prompts fits into {room} tokens: raise "
            "answers.max_prompt_tokens, lower answers.max_new_tokens or give shorter prompts"
        )
    return jobs


def _write_missing(
    target: Target, jobs: list[_Job], config: AnswersConfig, folder: Path, budget: Budget
) -> None:
    """Writes until every prompt is answered or the budget is spent."""
    while wanted := [job for job in jobs if budget.is_missing(job.prompt.id)]:
        if not budget.allows_another():
            return
        writer = Writer(
            target,
            batch_size=min(config.batch_size, len(wanted)),
            max_new_tokens=config.max_new_tokens,
            stop_ids=target.eos_token_ids,
            top_p=config.top_p,
            record=True,
        )
        by_key = {job.request.key: job for job in wanted}
        begun = budget.begin({job.request.key: job.prompt.id for job in wanted})
        texts = writer.write(
            (by_key[key].request for key in begun),
            longest_prompt=max(len(job.request.prompt_ids) for job in wanted),
        )
        shard: list[Answer] = []
        try:
            for text in texts:
                shard.append(_answer(by_key[text.request.key].prompt, text))
                budget.add(shard[-1].id, shard[-1].num_tokens)
                if sum(answer.num_tokens for answer in shard) >= config.shard_tokens:
                    finished, shard = shard, []
                    write_shard(folder, finished, hidden_dtype=config.hidden_dtype.torch)
        finally:  # Ctrl-C as well: what is written is not written again
            if shard:
                write_shard(folder, shard, hidden_dtype=config.hidden_dtype.torch)


def _job_key(jobs: Sequence[_Job], config: AnswersConfig) -> str:
    """Names the set of answers that a job leaves: its prompts and its budget."""
    content = [[job.prompt.id for job in jobs], config.max_tokens, config.max_seconds]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _store(path: Path, ids: list[str]) -> None:
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(json.dumps(ids) + "\n", encoding="utf-8")
    unfinished.rename(path)


def _answer(prompt: Prompt, text: Text) -> Answer:
    assert text.signal is not None
    return Answer(
        id=prompt.id,
        source=prompt.source,
        temperature=text.request.temperature,
        token_ids=torch.tensor([*text.request.prompt_ids, *text.token_ids]),
        prompt_length=len(text.request.prompt_ids),
        rows=text.signal,
    )
