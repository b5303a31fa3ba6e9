"""Where a run's target signals come from: recorded with the answers, cached, or from the live target."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from distill.answers.dataset import AnswerSet
from distill.answers.shards import Answer
from distill.cache.job import signal_folder
from distill.cache.manifest import make_manifest
from distill.cache.read import SignalCache
from distill.cache.write import write_signals
from distill.live_signals import with_live_states
from distill.manifests import fingerprint
from distill.signal_forms import SignalForm
from distill.signals import NoSignal, TargetRows
from specdec_runtime.target import Target
from train.job import Job
from train.processes import on_main


def with_signals(job: Job, target: Target, answers: AnswerSet) -> list[Answer]:
    """The answers with the signal that the run learns from, computed first where it is missing.

    For `signals.form=live` they have none; every batch gets its signal when it is taken.
    """
    form = job.config.signals.form
    if form is SignalForm.live:
        return [replace(answer, rows=NoSignal(answer.num_tokens)) for answer in answers.answers]
    if form is SignalForm.hidden and have_states(answers.answers):
        return answers.answers
    texts = fingerprint(answers.manifest)
    manifest = make_manifest(target, job.config.signals, answers_fingerprint=texts)
    folder = signal_folder(fingerprint(manifest))
    on_main(job.accelerator, lambda: _write(job, target, answers, folder, texts))
    cache = SignalCache.open(folder, wanted=manifest)
    job.say(f"signals: {form.value}, in {folder}")
    return cache.attach(answers.answers)


def with_states(target: Target, answers: list[Answer], *, max_positions: int) -> list[Answer]:
    """Answers with the target's last hidden states: all of them, or the first ones read now."""
    if have_states(answers):
        return answers
    return with_live_states(target, answers, max_positions=max_positions)


def have_states(answers: Sequence[Answer]) -> bool:
    """Whether the target's states were recorded while it wrote."""
    return all(isinstance(answer.rows, TargetRows) for answer in answers)


def _write(job: Job, target: Target, answers: AnswerSet, folder: Path, texts: str) -> None:
    total = sum(answer.num_tokens for answer in answers.answers)
    with job.progress("signals", total) as progress:
        write_signals(
            target,
            answers.answers,
            job.config.signals,
            folder,
            answers_fingerprint=texts,
            say=job.say,
            progress=progress.update,
            wait=True,  # another run of a sweep may be writing the same
        )
