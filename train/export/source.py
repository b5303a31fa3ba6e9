"""What is exported, and for which target: read once, the same for every format."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.utils import cached_file

from specdec_runtime.drafter_files import DrafterFiles, read
from specdec_runtime.fingerprint import folder_fingerprint
from specdec_runtime.formats import DrafterManifest, TargetRecord, check_target
from specdec_runtime.model_names import portable_name, resolve_model
from specdec_runtime.pretrained import load_module, load_tokenizer
from specdec_runtime.target import end_of_text_ids
from specdec_runtime.tokenizers import (
    check_same_tokenizer,
    real_vocab_size,
    template_hash,
    tokenizer_hash,
)
from train.export.adapters import base_model, merged_module

DEFAULT_DRAFT_TOKENS = 3
# Enough for a mean over positions; any text of the tokenizer will do.
SAMPLE_TEXT = (
    "The sky is blue because sunlight is scattered by the molecules of the air, and short waves are "
    "scattered most. In the evening the light comes a longer way:\n\n1. What is left is red.\n"
    "2. def add(a, b):\n    return a + b\n"
)


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What a format needs to know of the target; its weights are not read.

    Attributes:
        name: what an engine is told to load: a hub id or folder.
        record: what a drafter's folder records it as.
        folder: where it lies on this machine.
        config: of its text model.
        vocab_size: rows of its head, padding included.
    """

    name: str
    record: str
    folder: Path
    config: Any
    tokenizer: Any
    vocab_size: int
    real_vocab_size: int
    fingerprint: str
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def default_layer_ids(self) -> list[int]:
        """The layers that engines give an EAGLE-3 head that names none; residual after k layers."""
        return [2, self.num_layers // 2, self.num_layers - 3]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A drafter to export.

    notes: what turned out while it was written, a line each, for whoever exports.
    """

    files: DrafterFiles
    target: TargetFacts
    num_draft_tokens: int
    notes: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return self.files.kind

    @property
    def sample_ids(self) -> torch.Tensor:
        """[1, N] tokens of a short text."""
        ids = self.target.tokenizer(SAMPLE_TEXT, add_special_tokens=False).input_ids
        return torch.tensor([ids])

    @property
    def config(self) -> dict[str, Any]:
        """Of the drafter's own model."""
        if self.files.is_adapter:
            return AutoConfig.from_pretrained(base_model(self.files.folder)).to_dict()
        return self.files.config

    def module(self, dtype: torch.dtype | None) -> PreTrainedModel:
        """The drafter's own model on the CPU; a low-rank adapter is merged."""
        if self.files.is_adapter:
            merged = merged_module(self.files.folder, self.sample_ids, dtype=dtype)
            self.notes.append(merged.describe())
            return merged.module
        return load_module(self.files.folder, dtype=dtype or "auto", device="cpu")

    @cached_property
    def manifest(self) -> DrafterManifest:
        """Ours, or one made for a drafter that was trained elsewhere."""
        if self.files.manifest is not None:
            return self.files.manifest
        target = self.target
        return DrafterManifest(
            kind=self.kind,
            target=TargetRecord(
                name=target.record,
                fingerprint=target.fingerprint,
                vocab_size=target.vocab_size,
                real_vocab_size=target.real_vocab_size,
            ),
            tokenizer_hash=tokenizer_hash(target.tokenizer),
            template_hash=template_hash(target.tokenizer),
            recommended={"num_draft_tokens": self.num_draft_tokens},
        )


def read_source(folder: Path, *, target: str | None, num_draft_tokens: int | None) -> Source:
    """The drafter in `folder` with the target it belongs to.

    Raises:
        ValueError: no drafter, no target named, or one that the drafter was not trained for.
    """
    files = read(folder)
    name = target or (files.manifest.target.name if files.manifest is not None else None)
    if not name:
        raise ValueError(f"{folder} does not say which target it belongs to: give target=...")
    facts = read_target(name)
    if files.manifest is not None:
        check_recorded(files.manifest, facts)
    elif files.kind == "causal_lm":
        own = base_model(folder) if files.is_adapter else folder
        check_same_tokenizer(load_tokenizer(own), facts.tokenizer)
    recommended: Mapping[str, Any] = files.manifest.recommended if files.manifest else {}
    number = num_draft_tokens or recommended.get("num_draft_tokens") or DEFAULT_DRAFT_TOKENS
    return Source(files=files, target=facts, num_draft_tokens=int(number))


def read_target(name: str) -> TargetFacts:
    """Configuration, tokenizer and fingerprint of a target.

    Raises:
        ValueError: if there is no such model, or no tokenizer with it.
    """
    source = resolve_model(name)
    folder = _folder(source)
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    tokenizer = load_tokenizer(folder)
    has_settings = (folder / "generation_config.json").is_file()
    generation = GenerationConfig.from_pretrained(folder) if has_settings else None
    return TargetFacts(
        name=source,
        record=portable_name(name),
        folder=folder,
        config=text,
        tokenizer=tokenizer,
        vocab_size=text.vocab_size,
        real_vocab_size=real_vocab_size(tokenizer),
        fingerprint=folder_fingerprint(folder),
        eos_token_ids=end_of_text_ids(generation, text),
    )


def check_recorded(manifest: DrafterManifest, facts: TargetFacts) -> None:
    """Raise a ValueError if the manifest names another target than `facts`."""
    check_target(manifest, facts, tokenizer_hash(facts.tokenizer))


def _folder(source: str) -> Path:
    if Path(source).is_dir():
        return Path(source)
    try:
        config = cached_file(source, "config.json")
    except OSError as error:
        raise ValueError(f"no target {source!r}: {str(error).splitlines()[0]}") from None
    assert config is not None
    return Path(config).parent
