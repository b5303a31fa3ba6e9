"""One job of `python -m distill.cache`: which answers, which target, which form, where to."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

from distill.answers.dataset import AnswerSet
from distill.cache.manifest import make_manifest
from distill.cache.read import SignalCache
from distill.cache.write import write_signals
from distill.manifests import Manifest, fingerprint
from distill.progress import bar
from distill.signal_forms import SignalsConfig
from distill.target_choice import TargetChoice
from specdec_runtime.assets import cache_folder
from specdec_runtime.tokenizers import tokenizer_hash

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class CacheJob:
    """Settings of the command.

    Attributes:
        answers: folder of the answers.
        output: of the signals; made, or continued if it holds signals of the same settings.
            null = under their fingerprint in the user's cache, where training looks for them.
    """

    answers: str
    output: str | None = None
    target: TargetChoice = field(default_factory=TargetChoice)
    signals: SignalsConfig = field(default_factory=SignalsConfig)


def run_job(job: CacheJob) -> SignalCache:
    """Writes (or finishes) the signals of the answers.

    Raises:
        ValueError: for whatever a user can change; the message says how.
    """
    answers = AnswerSet.read(Path(job.answers))
    target = job.target.load()
    require_same_tokenizer(answers.manifest, tokenizer_hash(target.tokenizer))
    manifest = make_manifest(target, job.signals, answers_fingerprint=fingerprint(answers.manifest))
    folder = Path(job.output) if job.output else signal_folder(fingerprint(manifest))
    with bar("signals") as report:
        cache = write_signals(
            target,
            answers.answers,
            job.signals,
            folder,
            answers_fingerprint=fingerprint(answers.manifest),
            say=log.info,
            progress=report,
        )
    log.info("signals of %d answers in %s (%s)", len(cache.entries), folder, cache.fingerprint)
    return cache


def signal_folder(signals_fingerprint: str) -> Path:
    """Where signals of this fingerprint are kept for all runs."""
    return cache_folder() / "signals" / signals_fingerprint


def require_same_tokenizer(answers: Manifest, target_tokenizer: str) -> None:
    """Whether the target reads the answers' token ids as they were written.

    Raises:
        ValueError: if not; a target with another tokenizer has no signal at these tokens.
    """
    if answers["tokenizer_hash"] != target_tokenizer:
        raise ValueError(
            f"the answers were written with tokenizer {answers['tokenizer_hash'][:16]}, the target "
            f"has {target_tokenizer[:16]}: signals of a target with another tokenizer are not "
            "supported; have that target answer the prompts itself (python -m distill.answers)"
        )
