"""Writes a drafter as the folder of one engine: refused with the reason, or whole, checked, documented."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from specdec_runtime.formats import whole_folder
from train.card import license_of, write_card
from train.export.registry import Format, format_named
from train.export.source import Source, read_source


@dataclass(frozen=True)
class Exported:
    """A folder that passed its engine's check, and what to type to serve it."""

    folder: Path
    source: Source
    launch: str


def export(
    drafter: Path,
    to: Path,
    *,
    engine: str,
    target: str | None = None,
    num_draft_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    license_id: str | None = None,
    needs_license: bool = False,
) -> Exported:
    """Export the drafter in a folder of ours, a stock model, or an EAGLE-3 checkpoint.

    Args:
        to: must not exist, or be empty; appears complete or not at all.
        engine: a format's name.
        target: hub id or folder; None = the one recorded with the drafter.
        num_draft_tokens: to serve with; None = as recommended by its evaluation.
        dtype: of the weights; None = as they are.
        license_id: for the card; None = the one that the target's card states.
        needs_license: whether a folder that states none is an error, since it will be published.

    Raises:
        ValueError: the format cannot express the drafter, the drafter is damaged or of another
            target, the disk is full, or what was written does not pass the check.
    """
    chosen = format_named(engine)
    source = read_source(drafter, target=target, num_draft_tokens=num_draft_tokens)
    if reason := chosen.obstacle(source):
        raise ValueError(f"{drafter} cannot be exported to {engine}: {reason}")
    license_id = license_id or license_of(Path(source.target.name))
    if needs_license and license_id is None:
        raise ValueError(
            f"{drafter} states no licence, which others need to use it: give license=..."
        )
    with whole_folder(to) as draft:
        try:
            chosen.write(source, draft, dtype=dtype)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{to} could not be written: {error}") from None
        if problems := chosen.check(draft, source.target):
            raise ValueError(f"{drafter} makes no right folder for {engine}: {'; '.join(problems)}")
        launch = launch_line(chosen, draft, to, source)
        write_card(
            draft,
            engine=engine,
            launch=launch,
            num_draft_tokens=source.num_draft_tokens,
            license_id=license_id,
        )
    return Exported(to, source, launch)


def launch_line(chosen: Format, draft: Path, to: Path, source: Source) -> str:
    """The launch line for where the folder will be."""
    line = chosen.launch(draft, source.target, source.num_draft_tokens)
    return line.replace(str(draft), str(to))
