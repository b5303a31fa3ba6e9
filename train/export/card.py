"""README.md of an exported folder: hub metadata, what it belongs to, how to serve it."""

import json
from pathlib import Path

from huggingface_hub import metadata_load

from specdec_runtime.formats import read_manifest
from train.export.source import Source

CARD = "README.md"


def write_card(
    folder: Path, source: Source, *, engine: str, launch: str, license_id: str | None
) -> None:
    """Writes the card beside the weights.

    Args:
        license_id: as the hub names licences; None = the one that the target's card states.
    """
    text = card(
        folder,
        source,
        engine=engine,
        launch=launch,
        license_id=license_id or license_of(Path(source.target.name)),
    )
    (folder / CARD).write_text(text, encoding="utf-8")


def license_of(folder: Path) -> str | None:
    """The licence in the metadata of a folder's card; None if it states none."""
    path = folder / CARD
    if not path.is_file():
        return None
    return (metadata_load(path) or {}).get("license")


def card(folder: Path, source: Source, *, engine: str, launch: str, license_id: str | None) -> str:
    """The card's text; the figures are those that `draftloop.json` holds."""
    manifest = read_manifest(folder)
    target = manifest.target
    rows = [
        ("target", target.name),
        ("target fingerprint", f"`{target.fingerprint[:16]}`"),
        ("kind", f"`{manifest.kind}`"),
        ("format", f"`{engine}`"),
        ("draft tokens a round", source.num_draft_tokens),
        ("tokenizer", f"`{manifest.tokenizer_hash[:16]}`"),
        ("chat template", f"`{manifest.template_hash[:16]}`"),
    ]
    rows += [
        (name.replace("_", " "), f"{value:.3f}" if isinstance(value, float) else value)
        for name, value in sorted(manifest.measured.items())
    ]
    return "\n".join(
        [
            *_metadata(target.name, license_id),
            f"# Drafter for {target.name}",
            "",
            "A drafter for speculative decoding, trained and exported with Draftloop. With it the "
            "target's output stays what it is; only its speed changes.",
            "",
            "```",
            launch,
            "```",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows),
            "",
            "Acceptance length is tokens a target pass, the target's own one included; measured by "
            "Draftloop's runtime on the drafter that this folder was made from.",
            "",
        ]
    )


def _metadata(target: str, license_id: str | None) -> list[str]:
    """YAML front matter of the hub. The base model is named only where it is a hub id."""
    lines = ["---", "library_name: transformers", "tags:", "- speculative-decoding", "- draftloop"]
    if not Path(target).is_absolute() and target.count("/") == 1:
        lines.append(f"base_model: {json.dumps(target)}")
    if license_id:
        lines.append(f"license: {license_id}")
    return [*lines, "---", ""]
