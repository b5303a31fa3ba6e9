"""The formats a drafter can be exported to: one module each, all with the same functions."""

from pathlib import Path
from typing import Protocol

import torch

from train.export import (
    for_draftloop,
    for_llamacpp,
    for_sglang,
    for_speculators,
    for_transformers,
    for_vllm,
)
from train.export.source import Source, TargetFacts


class Format(Protocol):
    """What a format's module offers."""

    NAME: str

    def obstacle(self, source: Source) -> str | None:
        """Why the format cannot express this drafter; None if it can."""

    def write(self, source: Source, folder: Path, *, dtype: torch.dtype | None) -> None:
        """Fills an empty folder. `dtype` of the weights; None = as they are."""

    def check(self, folder: Path, target: TargetFacts) -> list[str]:
        """What the engine would stumble over, silently or not; empty if nothing."""

    def launch(self, folder: Path, target: TargetFacts, num_draft_tokens: int) -> str:
        """What to type to serve it."""


_MODULES: tuple[Format, ...] = (
    for_draftloop,
    for_transformers,
    for_vllm,
    for_speculators,
    for_sglang,
    for_llamacpp,
)
FORMATS: dict[str, Format] = {module.NAME: module for module in _MODULES}


def format_named(name: str) -> Format:
    """The format of this name.

    Raises:
        ValueError: if there is none.
    """
    if name not in FORMATS:
        raise ValueError(f"format={name} is not known, expected one of {', '.join(FORMATS)}")
    return FORMATS[name]
