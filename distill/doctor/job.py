"""One examination: prompts or answers in, findings and pictures out."""

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console

from distill.answers.config import AnswersConfig
from distill.answers.manifest import ANSWERS
from distill.answers.served import ServedTarget
from distill.doctor.data_checks import check_overlap, check_rows
from distill.doctor.estimate import Estimate, estimate, sizes_of
from distill.doctor.finding import Finding, Level, by_level
from distill.doctor.page import Report, write_page
from distill.doctor.rows import Examined, rows_of_answers, rows_of_prompts
from distill.doctor.statistics import Statistics, check_statistics, statistics_of
from distill.doctor.template_checks import check_template
from distill.doctor.terminal import show
from distill.doctor.tokenizer_checks import check_tokenizer
from distill.embedded_prompts import SUITES, Source
from distill.overlap import Overlap
from distill.prompt import Prompt
from distill.prompts import PromptsConfig, load_prompts, read_own
from distill.target_choice import TargetChoice
from distill.templates import ChatTemplate
from specdec_runtime.tokenizers import tokenizer_hash

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class DoctorJob:
    """Settings of the command.

    Attributes:
        prompts, answers: as they are to be trained with.
        answers_folder: look at these answers, and not at prompts that are still to be answered.
        batch_tokens: as training.batch_tokens.
        draft_vocab_size, draft_layers: of the drafter; the layers are for the estimate alone.
        html: the page that is written; null = none.
        show: conversations in the terminal.
    """

    target: TargetChoice = field(default_factory=TargetChoice)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    answers_folder: str | None = None
    batch_tokens: int = 4096
    draft_vocab_size: int | None = 8192
    draft_layers: int = 2
    html: str | None = "doctor.html"
    show: int = 1

    def __post_init__(self) -> None:
        for name, least in (
            ("batch_tokens", 1),
            ("draft_vocab_size", 1),
            ("draft_layers", 1),
            ("show", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be {least} or more, got {value}")


def run_job(job: DoctorJob) -> list[Finding]:
    """Examines, shows and writes what was found.

    Raises:
        ValueError: for what can not be read at all.
    """
    target = ServedTarget.load(job.target.model)
    template = ChatTemplate(target.tokenizer, dict(job.target.template_options))
    findings = list(check_template(template, target.eos_token_ids))
    findings += check_tokenizer(
        template, vocab_size=target.vocab_size, real_vocab_size=target.real_vocab_size
    )
    if job.answers_folder is not None:
        examined, evaluation, left_out = _answers(job, template, findings)
    else:
        examined, evaluation, left_out = _prompts(job, target, template, findings)
    findings += check_rows(examined, template, target.eos_token_ids)
    findings += check_overlap(examined, evaluation, template, left_out)
    statistics = statistics_of(
        examined.rows,
        template,
        batch_tokens=job.batch_tokens,
        draft_vocab_size=job.draft_vocab_size,
        real_vocab_size=target.real_vocab_size,
        eos_token_ids=target.eos_token_ids,
    )
    findings += check_statistics(statistics, job.draft_vocab_size)
    report = Report(
        title=f"{job.answers_folder or 'prompts'} for {target.name}",
        findings=by_level(findings),
        statistics=statistics,
        ahead=_ahead(job, examined, statistics),
        rows=examined.rows,
    )
    show(report, template, Console(), num_rows=job.show)
    if job.html is not None:
        write_page(Path(job.html), report, template)
        log.info("the page: %s", job.html)
    return report.findings


def _prompts(
    job: DoctorJob, target: ServedTarget, template: ChatTemplate, findings: list[Finding]
) -> tuple[Examined, dict[str, list[Prompt]], list[Overlap]]:
    """Rows of the training prompts; those that the target would write itself are not asked for."""
    config = job.prompts
    own_words = Source.self_prompted.value
    if config.file is None and config.sources.get(own_words, 0.0) > 0:
        rest = {name: share for name, share in config.shares.items() if name != own_words}
        if not rest:
            raise ValueError(
                "the target writes all of these prompts itself, so there is nothing to look at yet: "
                "have it answer them (python -m distill.answers) and give answers_folder=..."
            )
        share = config.shares[own_words] / sum(config.shares.values())
        config = replace(
            config,
            sources=config.sources | {own_words: 0.0},
            num_train=max(1, round(config.num_train * (1 - share))),
        )
        findings.append(
            Finding(
                Level.note,
                "not_written_yet",
                f"{share:.0%} of the prompts are written by the target when a run starts, and are "
                "not among what is looked at here",
            )
        )
    sets = load_prompts(config, own=read_own(config), template=template)
    examined = rows_of_prompts(sets, template, job.answers, target.max_positions)
    return examined, sets.suites, sets.overlaps


def _answers(
    job: DoctorJob, template: ChatTemplate, findings: list[Finding]
) -> tuple[Examined, dict[str, list[Prompt]], list[Overlap]]:
    """Rows of a folder, held against the target that is to be distilled."""
    folder = Path(job.answers_folder or "")
    manifest = ANSWERS.read(folder)
    for what, found, wanted in (
        ("tokenizer", manifest.get("tokenizer_hash"), tokenizer_hash(template.tokenizer)),
        ("chat template", manifest.get("template_hash"), template.hash),
    ):
        if found != wanted:
            findings.append(
                Finding(
                    Level.error,
                    f"other_{what.split()[-1]}",
                    f"the answers were written with {what} {str(found)[:16]}, the target has "
                    f"{wanted[:16]}",
                    "give target.model and target.template_options as they were written with "
                    f"({manifest.get('template_options')}), or write the answers again",
                )
            )
    suites = {name: SUITES[name]() for name in job.prompts.suites}
    return rows_of_answers(folder, template), suites, []


def _ahead(job: DoctorJob, examined: Examined, statistics: Statistics) -> list[tuple[str, str]]:
    """Name and value of what is still to be done."""
    missing = sum(row.num_trained == 0 for row in examined.rows)
    tokens = missing * job.answers.max_new_tokens
    if job.answers.max_tokens is not None:
        tokens = min(tokens, job.answers.max_tokens)
    found: Estimate = estimate(
        sizes_of(job.target.model),
        prompt_tokens=statistics.num_tokens - statistics.num_trained if missing else 0,
        tokens_to_write=tokens,
        row_tokens=statistics.num_tokens + tokens,
        trained_tokens=statistics.num_trained + tokens,
        draft_layers=job.draft_layers,
        draft_vocab_size=job.draft_vocab_size,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
    )
    return found.lines(tokens, statistics.batches)
