"""What a drafter is made from: the target, the prompts, and the answers that the target writes.

All of it is found in the user's cache where an earlier run left it. Which answers a run trains on
is noted in its folder, so that a continued run trains on exactly these.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from distill.answers.authors import author_of
from distill.answers.dataset import AnswerSet
from distill.answers.shards import Answer
from distill.answers.turns import collect_turns
from distill.cache.job import require_same_tokenizer
from distill.doctor.finding import Level
from distill.doctor.tokenizer_checks import check_tokenizer
from distill.manifests import fingerprint
from distill.prompt import Prompt, user_texts
from distill.prompts import PromptSets, load_prompts, read_own
from distill.self_prompts import self_prompts
from distill.templates import ChatTemplate
from eval.suites import EvalPrompt
from eval.trackers import Input
from specdec_runtime.assets import cache_folder
from specdec_runtime.loading import load_target
from specdec_runtime.model_names import resolve_model
from specdec_runtime.target import Target
from specdec_runtime.tokenizers import tokenizer_hash
from train.features import feature_folder
from train.job import Job
from train.processes import on_main
from train.run_dir import write_atomically
from train.signals import with_signals

ANSWERS = "answers.json"
HELD_OUT = "held_out"  # the suite of the same kinds as the training prompts


@dataclass(frozen=True)
class Material:
    target: Target
    template: ChatTemplate
    prompts: PromptSets
    answers: AnswerSet
    examples: list[Answer]  # the answers with the signal that the drafter learns from

    def selection_prompts(self, number: int) -> list[list[int]]:
        """Token ids of the held-out prompts that choose the best checkpoint."""
        chosen = self.prompts.suites[HELD_OUT][: _num_for_selection(self.prompts, number)]
        return [self.template.prompt_ids(prompt) for prompt in chosen]

    def evaluation_prompts(self, num_for_selection: int) -> dict[str, list[EvalPrompt]]:
        """The suites of the final evaluation; its held-out prompts chose no checkpoint."""
        first = _num_for_selection(self.prompts, num_for_selection)
        suites = self.prompts.suites | {HELD_OUT: self.prompts.suites[HELD_OUT][first:]}
        return {name: self._encoded(prompts) for name, prompts in suites.items()}

    @property
    def inputs(self) -> list[Input]:
        """What a tracker is told about the lineage of the drafter."""
        target = self.target
        return [
            Input("target", target.name, target.fingerprint),
            Input("dataset", "answers", self.answers.fingerprint),
        ]

    def _encoded(self, prompts: Sequence[Prompt]) -> list[EvalPrompt]:
        return [
            EvalPrompt(
                prompt.id,
                self.template.prompt_ids(prompt),
                prompt.category or prompt.source,
                user_texts(prompt)[-1],
            )
            for prompt in prompts
        ]


def prepare(job: Job) -> Material:
    """Loads the target and has it write what is missing.

    Raises:
        ValueError: if the target can not be fetched or loaded, or prompts can not be used.
    """
    config = job.config
    # Before the target is fetched: a broken line should be known at once.
    own = on_main(job.accelerator, lambda: read_own(config.prompts))
    with job.progress("target") as progress:
        progress.update(0, None, config.target.model)
        on_main(job.accelerator, lambda: resolve_model(config.target.model))  # one fetches
        target = load_target(
            config.target.model,
            dtype=config.target.dtype,
            device=_target_device(config.target.device, job.accelerator.device),
            engine=config.target.engine,
        )
    template = ChatTemplate(target.tokenizer, dict(config.target.template_options))
    _require_sound_tokenizer(target, template)
    prompts = on_main(job.accelerator, lambda: _prompts(job, own, target, template))
    sizes = ", ".join(f"{len(suite)} {name}" for name, suite in prompts.suites.items())
    job.say(f"prompts: {len(prompts.train)} for training; for evaluation {sizes}")
    folder, ids = on_main(job.accelerator, lambda: _write_answers(job, target, template, prompts))
    answers = AnswerSet.read(folder, order=ids)
    origin = "all of them the target's own"
    if answers.num_given_tokens:
        origin = f"{answers.num_given_tokens} of them the data sets' and not the target's own"
    job.say(
        f"answers: {len(answers.answers)} with {answers.num_tokens} tokens, {origin}, in {folder}"
    )
    examples = with_signals(job, target, answers)
    return Material(target, template, prompts, answers, examples)


def _target_device(wanted: str, trained_on: torch.device) -> torch.device | str:
    """Where the target runs: beside the drafter, unless a device of its own is named, or all."""
    return trained_on if wanted in ("auto", "cpu") else wanted


def _require_sound_tokenizer(target: Target, template: ChatTemplate) -> None:
    """Stops before hours are spent on texts that the target was never shown.

    Raises:
        ValueError: with the example that does not come back, or ids that the head does not have.
    """
    sizes = {"vocab_size": target.model.vocab_size, "real_vocab_size": target.real_vocab_size}
    for finding in check_tokenizer(template, **sizes):
        if finding.level is Level.error:
            raise ValueError(finding.text)


def _prompts(
    job: Job, own: dict[str, list[Prompt]], target: Target, template: ChatTemplate
) -> PromptSets:
    def written_by_target(count: int, seed: int) -> list[str]:
        with job.progress("prompts that the target writes", count) as progress:
            return self_prompts(target, template, count, seed, progress=progress.update)

    job.stage = "prompts"
    return load_prompts(
        job.config.prompts, own=own, self_prompting=written_by_target, template=template
    )


def _write_answers(
    job: Job, target: Target, template: ChatTemplate, prompts: PromptSets
) -> tuple[Path, list[str]]:
    """(folder, ids of the answered prompts in training order); notes both in the run folder."""
    note = job.run_dir / ANSWERS
    if note.is_file():
        noted = json.loads(note.read_text())
        return Path(noted["folder"]), noted["ids"]
    config = job.config.answers
    if job.config.answers_folder is not None:
        folder = Path(job.config.answers_folder).resolve()
        ids = _existing(folder, target, template, prompts)
    else:
        layers = job.config.draft.feature_layers(target.model.num_layers)
        kept = feature_folder(target, layers) if layers else None
        author = author_of(target, template, config, inner_states=kept)
        folder = answer_folder(fingerprint(author.manifest))
        total = config.max_tokens if config.max_tokens is not None else len(prompts.train)
        with job.progress("answers", total) as progress:
            written = collect_turns(  # another run of a sweep may be writing the same
                author, prompts.train, config, folder, progress=progress.update, wait=True
            )
        ids = [answer.id for answer in written.answers]
    write_atomically(note, json.dumps({"folder": str(folder), "ids": ids}, indent=1))
    return folder, ids


def _existing(
    folder: Path, target: Target, template: ChatTemplate, prompts: PromptSets
) -> list[str]:
    """Ids of the answers of a folder that this target can be distilled on, without those to prompts
    that the evaluation asks.

    Raises:
        ValueError: if they were written with another tokenizer or template.
    """
    answers = AnswerSet.read(folder)
    require_same_tokenizer(answers.manifest, tokenizer_hash(target.tokenizer))
    if answers.manifest["template_hash"] != template.hash:
        raise ValueError(
            f"{folder} was written with template {answers.manifest['template_hash'][:16]}, the "
            f"target is served with {template.hash[:16]}: give target.template_options as they "
            f"were ({answers.manifest['template_options']}), or have the answers written again"
        )
    asked = {prompt.id for suite in prompts.suites.values() for prompt in suite}
    return [answer.id for answer in answers.answers if answer.id.partition("#")[0] not in asked]


def answer_folder(answers_fingerprint: str) -> Path:
    """Where answers of this fingerprint are kept for all runs."""
    return cache_folder() / "answers" / answers_fingerprint


def _num_for_selection(prompts: PromptSets, number: int) -> int:
    """At most half of the held-out prompts choose checkpoints; the others judge the result."""
    return max(1, min(number, len(prompts.suites[HELD_OUT]) // 2))
