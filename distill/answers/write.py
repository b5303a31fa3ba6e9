"""The job: every prompt answered once, however often the job is killed and started again.

What is in a finished shard is done; everything else is written (again). Since an answer depends on
its prompt and the seed alone (writer.py), a job that was killed three times leaves the same answers
as one that was not.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from distill.answered_turns import answered_turn
from distill.answers.authors import Author, author_of
from distill.answers.budget import Budget
from distill.answers.config import AnswersConfig
from distill.answers.dataset import AnswerSet
from distill.answers.manifest import ANSWERS
from distill.answers.shards import (
    GIVEN,
    Answer,
    remove_unfinished,
    shard_paths,
    token_numbers,
    write_shard,
)
from distill.answers.size import announce_size
from distill.durable import save_text
from distill.progress import Progress
from distill.prompt import Prompt
from distill.signals import NoSignal
from distill.templates import ChatTemplate
from distill.writer import Request, Text
from specdec_runtime.file_lock import exclusive
from specdec_runtime.target import Target

log = logging.getLogger(__name__)


class _Job(NamedTuple):
    id: str  # of the answer
    prompt: Prompt
    request: Request
    given: list[int] | None = None  # the answer, where the data set brings it


def write_answers(
    target: Target,
    prompts: Sequence[Prompt],
    config: AnswersConfig,
    folder: Path,
    *,
    template: ChatTemplate | None = None,
    progress: Progress | None = None,
) -> AnswerSet:
    """Has the target, or a server that runs it, answer the prompts.

    Args:
        template: how conversations are rendered; None = the tokenizer's own, without options.

    Further arguments and errors as `collect_answers`.
    """
    template = template or ChatTemplate(target.tokenizer)
    author = author_of(target, template, config)
    return collect_answers(author, prompts, config, folder, progress=progress)


def collect_answers(
    author: Author,
    prompts: Sequence[Prompt],
    config: AnswersConfig,
    folder: Path,
    *,
    progress: Progress | None = None,
    wait: bool = False,
) -> AnswerSet:
    """Has the author answer the prompts, in their order, as far as the budget goes.

    A folder that was written with the same settings is continued. A job that has ended is never run
    again: the same prompts and budget give exactly the answers it left, whatever was added since.

    Args:
        progress: called a few times a second.
        wait: for another process that writes the folder; otherwise that is an error.

    Raises:
        ValueError: for a folder of other answers, a second process on the same folder, or prompts
            that are all too long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / ".lock", wait=wait):
        ANSWERS.claim(folder, author.manifest)
        remove_unfinished(folder)
        jobs = _jobs(prompts, author.template, config, author.max_positions)
        record = folder / f"job-{_job_key(jobs, config)}.json"
        if not record.exists():
            order = [job.id for job in jobs]
            done: dict[str, int] = {}
            for path in shard_paths(folder):
                done |= token_numbers(path)
            lengths = {job.id: len(job.request.prompt_ids) for job in jobs}
            announce_size(author, lengths, done, config, folder)
            budget = Budget(config, order, done, progress)
            _write_missing(author, jobs, config, folder, budget)
            save_text(record, json.dumps(budget.answered()) + "\n")
        return AnswerSet.read(folder, order=json.loads(record.read_text()))


def _jobs(
    prompts: Sequence[Prompt], template: ChatTemplate, config: AnswersConfig, max_positions: int
) -> list[_Job]:
    """The prompts that are short enough, rendered, each as often as it is to be answered."""
    room = min(config.max_prompt_tokens, max_positions - config.max_new_tokens)
    if room < 1:
        raise ValueError(
            f"answers.max_new_tokens={config.max_new_tokens} leaves no room for a prompt: the target "
            f"has {max_positions} positions"
        )
    jobs: list[_Job] = []
    fitting, unusable = 0, []
    for prompt in {prompt.id: prompt for prompt in prompts}.values():
        try:
            token_ids, given = _rendered(prompt, template, config)
        except ValueError as error:
            unusable.append(f"{prompt.id}: {error}")
            continue
        if not 0 < len(token_ids) <= room:
            continue
        fitting += 1
        for number, temperature in enumerate(_temperatures(prompt, config)):
            name = sample_id(prompt.id, number)
            request = Request(len(jobs), token_ids, temperature, _noise(name, config)[1])
            jobs.append(_Job(name, prompt, request, given))
    if unusable:
        log.warning("%d prompts are left out, first %s", len(unusable), unusable[0])
    if left_out := len(prompts) - fitting - len(unusable):
        log.warning(
            "%d of %d prompts are left out: repeated, or longer than %d tokens",
            left_out,
            len(prompts),
            room,
        )
    if not jobs:
        raise ValueError(
            unusable[0]
            if unusable
            else f"none of the {len(prompts)} prompts fits into {room} tokens: raise "
            "answers.max_prompt_tokens, lower answers.max_new_tokens or give shorter prompts"
        )
    return jobs


def _rendered(
    prompt: Prompt, template: ChatTemplate, config: AnswersConfig
) -> tuple[list[int], list[int] | None]:
    """(prompt, the data set's own answer to it as far as an answer may go, or None)."""
    if prompt.answer is None:
        return template.prompt_ids(prompt), None
    turn = answered_turn(template, prompt)
    if not turn.answer_ids:
        raise ValueError("its own answer is empty: there is nothing to train on")
    return turn.prompt_ids, turn.answer_ids[: config.max_new_tokens]


def sample_id(prompt_id: str, number: int) -> str:
    """The id of an answer: the first one to a prompt has the prompt's."""
    return prompt_id if number == 0 else f"{prompt_id}#{number}"


def _temperatures(prompt: Prompt, config: AnswersConfig) -> list[float]:
    """Of each answer to a prompt: in turn from a place that the prompt decides, one greedy."""
    if prompt.answer is not None:
        return [GIVEN]
    turn, _ = _noise(prompt.id, config)
    chosen: list[float] = []
    for number in range(config.samples_per_prompt):
        temperature = config.temperatures[(turn + number) % len(config.temperatures)]
        if temperature > 0 or 0.0 not in chosen:
            chosen.append(temperature)
    return chosen


def _noise(name: str, config: AnswersConfig) -> tuple[int, int]:
    """Two independent numbers of one hash: which temperature, which noise."""
    digest = hashlib.sha256(f"{config.seed}\x1f{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")


def _write_missing(
    author: Author, jobs: list[_Job], config: AnswersConfig, folder: Path, budget: Budget
) -> None:
    """Writes until every prompt is answered or the budget is spent."""
    num_dropped = 0
    while wanted := [job for job in jobs if budget.is_missing(job.id)]:
        if not budget.allows_another():
            break
        by_key = {job.request.key: job for job in wanted}
        shard: list[Answer] = []
        try:
            for text in _texts(author, wanted, budget):
                job = by_key[text.request.key]
                if not text.token_ids:
                    budget.drop(job.id)
                    num_dropped += 1
                    continue
                answer = _answer(job, text)
                # Texts with and without a signal are not of one shard.
                if shard and type(shard[-1].rows) is not type(answer.rows):
                    finished, shard = shard, []
                    write_shard(folder, finished, hidden_dtype=config.hidden_dtype.torch)
                shard.append(answer)
                budget.add(answer.id, answer.num_tokens)
                if sum(answer.num_tokens for answer in shard) >= config.shard_tokens:
                    finished, shard = shard, []
                    write_shard(folder, finished, hidden_dtype=config.hidden_dtype.torch)
        finally:  # Ctrl-C as well: what is written is not written again
            if shard:
                write_shard(folder, shard, hidden_dtype=config.hidden_dtype.torch)
    if num_dropped:
        log.warning(
            "%d answers were dropped: broken off by the server, or text whose token ids can not be "
            "known for certain",
            num_dropped,
        )


def _texts(author: Author, wanted: Sequence[_Job], budget: Budget) -> Iterator[Text]:
    """The answers that the data sets bring, then those that the author writes."""
    given = {job.request.key: job for job in wanted if job.given is not None}
    for key in budget.begin({key: job.id for key, job in given.items()}):
        yield Text(given[key].request, list(given[key].given or ()))
    asked = {job.request.key: job for job in wanted if job.given is None}
    if asked and budget.allows_another():
        begun = budget.begin({key: job.id for key, job in asked.items()})
        yield from author.writer(len(asked)).write(
            (asked[key].request for key in begun),
            longest_prompt=max(len(job.request.prompt_ids) for job in asked.values()),
        )


def _job_key(jobs: Sequence[_Job], config: AnswersConfig) -> str:
    """Names the set of answers that a job leaves: its prompts and its budget."""
    content = [[job.id for job in jobs], config.max_tokens, config.max_seconds]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _answer(job: _Job, text: Text) -> Answer:
    return Answer(
        id=job.id,
        source=job.prompt.source,
        temperature=text.request.temperature,
        token_ids=torch.tensor([*text.request.prompt_ids, *text.token_ids]),
        prompt_length=len(text.request.prompt_ids),
        rows=NoSignal(len(text.token_ids)) if text.signal is None else text.signal,
    )
