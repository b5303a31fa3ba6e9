"""One job of `python -m distill.answers`: target, prompts, answers, each under its own settings."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from distill.answers.budget import Progress as Report
from distill.answers.config import AnswersConfig
from distill.answers.dataset import AnswerSet
from distill.answers.write import write_answers
from distill.prompts import PromptsConfig, load_prompts
from distill.self_prompts import self_prompts
from distill.target_folder import DEFAULT_TARGET, resolve_target
from distill.templates import ChatTemplate
from specdec_runtime.engines import Engine
from specdec_runtime.loading import load_target

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TargetChoice:
    """The model that answers; the arguments of `specdec_runtime.loading.load_target`.

    Attributes:
        model: hub id, local folder, GGUF file, or the name of the embedded default.
        template_options: given to the chat template, as where the target is served.
    """

    model: str = DEFAULT_TARGET
    dtype: str = "auto"
    device: str = "auto"
    engine: Engine = Engine.auto
    template_options: dict[str, str | bool] = field(default_factory=dict)


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
    target = load_target(
        resolve_target(job.target.model),
        dtype=job.target.dtype,
        device=job.target.device,
        engine=job.target.engine,
    )
    template = ChatTemplate(target.tokenizer, dict(job.target.template_options))

    def prompting(count: int, seed: int) -> list[str]:
        with _bar("prompts") as report:
            return self_prompts(target, template, count, seed, progress=report)

    prompts = load_prompts(job.prompts, self_prompting=prompting)
    with _bar("answers") as report:
        answers = write_answers(
            target,
            prompts.train,
            job.answers,
            Path(job.output),
            template=template,
            progress=report,
        )
    log.info(
        "%d answers, %d tokens in %s (%s)",
        len(answers.answers),
        answers.num_tokens,
        job.output,
        answers.fingerprint,
    )
    return answers


@contextmanager
def _bar(name: str) -> Iterator[Report]:
    """A progress bar on standard error, from the first report on."""
    columns = (
        TextColumn(name),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f}"),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=1, note="", visible=False)

        def report(done: int, total: int, note: str) -> None:
            progress.update(task, completed=done, total=total, note=note, visible=True)

        yield report
