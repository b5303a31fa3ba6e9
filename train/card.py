"""README.md of a drafter folder: hub metadata, what it belongs to, how it was measured, how to use it."""

import json
from pathlib import Path

from huggingface_hub import metadata_load

from specdec_runtime.formats import DrafterManifest, read_manifest
from train.run_dir import write_atomically

CARD = "README.md"


def write_card(
    folder: Path,
    *,
    engine: str = "draftloop",
    launch: str | None = None,
    num_draft_tokens: int | None = None,
    license_id: str | None = None,
) -> None:
    """Writes the card beside the weights; its figures are those that `draftloop.json` holds.

    Args:
        engine: which engine's format the folder has.
        launch: what to type to serve it; None = a few lines of Python.
        num_draft_tokens: a round; None = as recommended by its evaluation.
        license_id: as the hub names licences; None = the one that the target's card states.
    """
    manifest = read_manifest(folder)
    number = num_draft_tokens or manifest.recommended.get("num_draft_tokens", 3)
    usage = ["```", launch, "```"] if launch is not None else _in_python(manifest, number)
    lines = [
        *_metadata(manifest.target.name, license_id or license_of(Path(manifest.target.name))),
        f"# Drafter for {manifest.target.name}",
        "",
        "A drafter for speculative decoding, made with Draftloop. With it the target's output stays "
        "what it is; only its speed changes.",
        "",
        *usage,
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in _rows(manifest, engine, number)),
        "",
        "Acceptance length is tokens a target pass, the target's own one included; measured by "
        "Draftloop's runtime.",
        "",
    ]
    write_atomically(folder / CARD, "\n".join(lines))


def license_of(folder: Path) -> str | None:
    """The licence in the metadata of a folder's card; None if it states none."""
    path = folder / CARD
    if not path.is_file():
        return None
    return (metadata_load(path) or {}).get("license")


def _rows(manifest: DrafterManifest, engine: str, number: int) -> list[tuple[str, object]]:
    target = manifest.target
    known = [
        ("target", f"{target.name} {target.revision}".rstrip()),
        ("target fingerprint", f"`{target.fingerprint[:16]}`"),
        ("kind", f"`{manifest.kind}`"),
        ("format", f"`{engine}`"),
        ("draft tokens a round", number),
        ("tokenizer", f"`{manifest.tokenizer_hash[:16]}`"),
        ("chat template", f"`{manifest.template_hash[:16]}`"),
        ("training data", f"`{manifest.training_data_fingerprint[:16]}`"),
    ]
    measured = [
        (name.replace("_", " "), f"{value:.3f}" if isinstance(value, float) else value)
        for name, value in sorted(manifest.measured.items())
    ]
    return [(name, value) for name, value in [*known, *measured] if value != "``"]


def _in_python(manifest: DrafterManifest, number: int) -> list[str]:
    return [
        "```python",
        "from specdec_runtime import SpeculativeDecoder, load_drafter, load_target",
        "",
        f"target = load_target({manifest.target.name!r})",
        'drafter = load_drafter("PATH_OF_THIS_FOLDER", target)',
        f"decoder = SpeculativeDecoder(target, drafter, num_draft_tokens={number})",
        'print(decoder.generate(["..."], max_new_tokens=64).text(0))',
        "```",
    ]


def _metadata(target: str, license_id: str | None) -> list[str]:
    """YAML front matter of the hub. The base model is named only where it is a hub id."""
    lines = ["---", "library_name: transformers", "tags:", "- speculative-decoding", "- draftloop"]
    if not Path(target).is_absolute() and target.count("/") == 1:
        lines.append(f"base_model: {json.dumps(target)}")
    if license_id:
        lines.append(f"license: {license_id}")
    return [*lines, "---", ""]
