"""What an answer folder was written with: two folders of equal fingerprint hold equal answers.

The fingerprint covers everything that decides what the answer to a prompt is: the target's weights,
its tokenizer, the template with its options, the sampling. It does not cover how many prompts there
are or how long the job may take: a folder can be continued with more. Nothing of training is in it,
so changing a learning rate reuses the answers.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distill.answers.config import AnswersConfig
from distill.templates import ChatTemplate
from specdec_runtime.target import Target
from specdec_runtime.tokenizers import tokenizer_hash

MANIFEST_NAME = "answers.json"
FORMAT_VERSION = 1

Manifest = dict[str, Any]


def make_manifest(target: Target, template: ChatTemplate, config: AnswersConfig) -> Manifest:
    """Everything that decides the answers, readable and in JSON's own types."""
    return {
        "format_version": FORMAT_VERSION,
        "target": target.name,
        "target_revision": target.revision,
        "target_fingerprint": target.fingerprint,
        "target_dtype": str(target.model.dtype).removeprefix("torch."),
        "vocab_size": target.model.vocab_size,
        "real_vocab_size": target.real_vocab_size,
        "hidden_size": target.model.hidden_size,
        "eos_token_ids": list(target.eos_token_ids),
        "tokenizer_hash": tokenizer_hash(target.tokenizer),
        "template_hash": template.hash,
        "template_options": dict(template.options),
        "temperatures": [float(value) for value in config.temperatures],
        "top_p": config.top_p,
        "max_new_tokens": config.max_new_tokens,
        "max_prompt_tokens": config.max_prompt_tokens,
        "hidden_dtype": config.hidden_dtype.value,
        "seed": config.seed,
    }


def fingerprint(manifest: Mapping[str, Any]) -> str:
    """16 hexadecimal digits; where a target lies on this machine does not count."""
    named = {key: value for key, value in manifest.items() if key != "target"}
    content = json.dumps(named, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def claim(folder: Path, manifest: Manifest) -> None:
    """Makes `folder` one of this manifest, or finds that it is.

    Raises:
        ValueError: if it holds answers of another one, naming both fingerprints and what differs.
    """
    path = folder / MANIFEST_NAME
    if path.exists():
        require_equal(folder, read_manifest(folder), manifest)
        return
    others = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
    if others:
        raise ValueError(
            f"{folder} holds {others[0]} and no {MANIFEST_NAME}: choose an empty folder for answers"
        )
    unfinished = folder / f".{MANIFEST_NAME}"
    unfinished.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    unfinished.rename(path)


def require_equal(folder: Path, found: Manifest, wanted: Manifest) -> None:
    """Refuses answers that were written with something else (case F8).

    Raises:
        ValueError: naming both fingerprints and the first setting that differs.
    """
    if fingerprint(found) == fingerprint(wanted):
        return
    differing = [key for key in wanted if found.get(key) != wanted[key] and key != "target"]
    key = differing[0]
    raise ValueError(
        f"{folder} holds answers {fingerprint(found)}, wanted are {fingerprint(wanted)}: {key} is "
        f"{found.get(key)!r} there and {wanted[key]!r} here; use another folder, or delete this one"
    )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an answer folder.

    Raises:
        ValueError: if there is none, or one that this version does not know.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise ValueError(f"{folder} holds no answers ({MANIFEST_NAME} is missing)")
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format {manifest.get('format_version')}, this version reads "
            f"{FORMAT_VERSION}: write the answers again"
        )
    return manifest
