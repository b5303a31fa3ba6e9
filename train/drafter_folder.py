"""The drafter folder as training writes it: into every checkpoint, and as the product of a run."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.recipe import Recipe
from specdec_runtime.formats import (
    DRAFT_VOCAB_NAME,
    MANIFEST_NAME,
    DrafterManifest,
    TargetRecord,
    read_manifest,
    write_drafter,
)
from specdec_runtime.target import Target
from specdec_runtime.tokenizers import template_hash, tokenizer_hash
from train.card import write_card
from train.run_dir import write_atomically


class DrafterWriter:
    """Writes the drafter under training as a folder that the runtime loads.

    Args:
        dtype: of the written weights; the module itself keeps its float32 masters.
        draft_vocab: d2t and t2d of a reduced output vocabulary (specdec_runtime/formats.py), or None.
    """

    def __init__(
        self,
        recipe: Recipe,
        manifest: DrafterManifest,
        *,
        tokenizer: Any,
        dtype: torch.dtype,
        draft_vocab: dict[str, Tensor] | None,
    ) -> None:
        self._recipe = recipe
        self._manifest = manifest
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._tensors = {DRAFT_VOCAB_NAME: draft_vocab} if draft_vocab is not None else None

    def __call__(self, folder: Path) -> Path:
        """Raises a ValueError if the folder exists and holds anything."""
        written = self._recipe.written(self._dtype)
        measured = self._manifest.measured | self._recipe.writing_report(written)
        return write_drafter(
            folder,
            written,
            replace(self._manifest, measured=measured),
            tokenizer=self._tokenizer,
            tensors=self._tensors,
        )


def manifest_for(
    target: Target,
    *,
    kind: str,
    target_name: str,
    training_data_fingerprint: str,
    num_draft_tokens: int,
    template_options: dict[str, Any],
    kind_config: dict[str, Any],
) -> DrafterManifest:
    """The manifest of a drafter for `target`, before anything is measured on its folder."""
    return DrafterManifest(
        kind=kind,
        target=TargetRecord(
            name=target_name,
            revision=target.revision,
            fingerprint=target.fingerprint,
            vocab_size=target.model.vocab_size,
            real_vocab_size=target.real_vocab_size,
        ),
        tokenizer_hash=tokenizer_hash(target.tokenizer),
        template_hash=template_hash(target.tokenizer),
        template_options=template_options,
        training_data_fingerprint=training_data_fingerprint,
        recommended={"num_draft_tokens": num_draft_tokens},
        kind_config=kind_config,
    )


def add_measurements(
    folder: Path, *, measured: dict[str, Any], recommended: dict[str, Any]
) -> None:
    """Stores what the evaluation of this folder found; settings not measured stay as they are."""
    manifest = read_manifest(folder)
    manifest.measured = manifest.measured | measured
    manifest.recommended = manifest.recommended | recommended
    text = json.dumps(asdict(manifest), indent=2, sort_keys=True) + "\n"
    write_atomically(folder / MANIFEST_NAME, text)
    write_card(folder)
