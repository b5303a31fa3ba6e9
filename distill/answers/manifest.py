"""What an answer folder was written with: two folders of equal fingerprint hold equal answers.

The fingerprint covers everything that decides what the answer to a prompt is: the target's weights,
its tokenizer, the template with its options, the sampling. It does not cover how many prompts there
are or how long the job may take: a folder can be continued with more. Nothing of training is in it,
so changing a learning rate reuses the answers.
"""

from pathlib import Path
from typing import Any

from distill.answers.config import AnswersConfig
from distill.answers.served import ServedTarget
from distill.manifests import FolderKind, Manifest, fingerprint
from distill.templates import ChatTemplate
from specdec_runtime.fingerprint import folder_fingerprint
from specdec_runtime.target import Target
from specdec_runtime.tokenizers import tokenizer_hash

__all__ = ["ANSWERS", "Manifest", "fingerprint", "make_manifest", "make_served_manifest"]

ANSWERS = FolderKind("answers", format_version=1)


def make_manifest(target: Target, template: ChatTemplate, config: AnswersConfig) -> Manifest:
    """Everything that decides the answers, readable and in JSON's own types."""
    helped = {"drafter": _drafter_identity(config.drafter)} if config.drafter else {}
    return {
        "format_version": ANSWERS.format_version,
        "target": target.name,
        "target_revision": target.revision,
        "target_fingerprint": target.fingerprint,
        "target_dtype": str(target.model.dtype).removeprefix("torch."),
        "vocab_size": target.model.vocab_size,
        "real_vocab_size": target.real_vocab_size,
        "hidden_size": target.model.hidden_size,
        "hidden_dtype": config.hidden_dtype.value,
        **helped,
        **_text_and_sampling(target, template, config),
    }


def _drafter_identity(spec: str) -> str:
    """The drafter with which sampled answers are what they are; where it lies does not count."""
    return folder_fingerprint(Path(spec)) if Path(spec).is_dir() else spec


def make_served_manifest(
    target: ServedTarget, report: dict[str, Any], template: ChatTemplate, config: AnswersConfig
) -> Manifest:
    """The same of answers that a server writes: what it says of its model stands for the weights.

    The server's address is not in it, so several servers of one model, or one that has moved, can
    write into one folder.
    """
    return {
        "format_version": ANSWERS.format_version,
        "target": target.name,
        "server_model": report,
        "server_extra": dict(config.server.extra),
        "vocab_size": target.vocab_size,
        "real_vocab_size": target.real_vocab_size,
        **_text_and_sampling(target, template, config),
    }


def _text_and_sampling(
    target: Target | ServedTarget, template: ChatTemplate, config: AnswersConfig
) -> Manifest:
    return {
        "eos_token_ids": list(target.eos_token_ids),
        "tokenizer_hash": tokenizer_hash(target.tokenizer),
        "template_hash": template.hash,
        "template_options": dict(template.options),
        "temperatures": [float(value) for value in config.temperatures],
        "top_p": config.top_p,
        "max_new_tokens": config.max_new_tokens,
        "max_prompt_tokens": config.max_prompt_tokens,
        "seed": config.seed,
    }
