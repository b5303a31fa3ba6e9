"""One job of `python -m distill.answers`: target, prompts, answers, each under its own settings."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

from distill.answers.authors import Author, RuntimeAuthor, ServerAuthor
from distill.answers.config import AnswersConfig
from distill.answers.dataset import AnswerSet
from distill.answers.served import ServedTarget
from distill.answers.turns import collect_turns
from distill.embedded_prompts import SelfPrompting
from distill.progress import bar
from distill.prompts import PromptsConfig, load_prompts, read_own
from distill.self_prompts import self_prompts
from distill.target_choice import TargetChoice
from distill.templates import ChatTemplate

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class AnswersJob:
    """Settings of the command.

    Attributes:
        output: folder of the answers; made, or continued if it holds answers of the same settings.
    """

    output: str
    target: TargetChoice = field(default_factory=TargetChoice)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)


def run_job(job: AnswersJob) -> AnswerSet:
    """Writes (or finishes) the answers to the training prompts of the settings.

    Raises:
        ValueError: for whatever a user can change; the message says how.
    """
    own = read_own(job.prompts)  # a broken line should be known at once
    author, prompting = _author(job)
    prompts = load_prompts(job.prompts, own=own, self_prompting=prompting, template=author.template)
    with bar("answers") as report:
        answers = collect_turns(
            author, prompts.train, job.answers, Path(job.output), progress=report
        )
    log.info(
        "%d answers, %d tokens in %s (%s)",
        len(answers.answers),
        answers.num_tokens,
        job.output,
        answers.fingerprint,
    )
    return answers


def _author(job: AnswersJob) -> tuple[Author, SelfPrompting | None]:
    """Who answers, and who writes prompts; for a server the target's weights are not loaded."""
    options = dict(job.target.template_options)
    if job.answers.server.url is not None:
        served = ServedTarget.load(job.target.model)
        return ServerAuthor(served, ChatTemplate(served.tokenizer, options), job.answers), None
    target = job.target.load()
    template = ChatTemplate(target.tokenizer, options)

    def prompting(count: int, seed: int) -> list[str]:
        with bar("prompts") as report:
            return self_prompts(target, template, count, seed, progress=report)

    return RuntimeAuthor(target, template, job.answers), prompting
