"""The drafter folder: a plain Hugging Face folder plus `draftloop.json`.

The manifest says which target the drafter was trained for and how it wants to be used; loading
checks it against the target at hand. Folders are written complete or not at all.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

MANIFEST_NAME = "draftloop.json"
DRAFT_VOCAB_NAME = "draft_vocab.safetensors"
WEIGHTS_NAME = "model.safetensors"
FORMAT_VERSION = 1


@dataclass(kw_only=True)
class TargetRecord:
    """Which target a drafter was trained for."""

    name: str
    revision: str = ""
    fingerprint: str = ""
    vocab_size: int = 0
    real_vocab_size: int = 0


@dataclass(kw_only=True)
class DrafterManifest:
    """What `draftloop.json` holds.

    Attributes:
        kind: a module of specdec_runtime.drafters.
        target: the target trained for.
        tokenizer_hash, template_hash: of the target's tokenizer and chat template.
        template_options: as given to `apply_chat_template`.
        training_data_fingerprint: of the answers trained on.
        measured: acceptance and speed as measured on this folder; free form.
        recommended: num_draft_tokens and draft_temperature to decode with.
        kind_config: settings of the kind.
        served: of an exported folder: its format, and what decides its forward pass as exported, for
            `python -m train.export check=...` to compare with.
    """

    kind: str
    target: TargetRecord
    tokenizer_hash: str = ""
    template_hash: str = ""
    template_options: dict[str, Any] = field(default_factory=dict)
    training_data_fingerprint: str = ""
    measured: dict[str, Any] = field(default_factory=dict)
    recommended: dict[str, Any] = field(default_factory=dict)
    kind_config: dict[str, Any] = field(default_factory=dict)
    served: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


def write_drafter(
    folder: str | Path,
    drafter_module: Any,
    manifest: DrafterManifest,
    *,
    tokenizer: Any = None,
    tensors: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> Path:
    """Write a drafter folder; it appears complete or not at all.

    Args:
        folder: must not exist, or be empty.
        drafter_module: anything with `save_pretrained(path)`.
        manifest: becomes draftloop.json.
        tokenizer: saved beside the weights.
        tensors: further files by name, e.g. `DRAFT_VOCAB_NAME`.

    Raises:
        ValueError: if the folder exists and is not empty.
    """
    with whole_folder(folder) as draft:
        drafter_module.save_pretrained(draft)
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        for name, content in (tensors or {}).items():
            save_file({key: t.contiguous() for key, t in content.items()}, draft / name)
        write_manifest(draft, manifest)
    return Path(folder)


@contextmanager
def whole_folder(folder: str | Path) -> Iterator[Path]:
    """A temporary folder to write into; it becomes `folder` at the end, or leaves nothing.

    Raises:
        ValueError: if `folder` exists and is not empty.
    """
    folder = Path(folder)
    check_writable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield draft
        _sync(draft)
        draft.chmod(0o755)  # mkdtemp makes private folders
        check_writable(folder)
        draft.replace(folder)  # an empty folder is replaced, a filled one is an error
    except BaseException:
        shutil.rmtree(draft)
        raise
    _sync_entry(folder.parent)


def write_manifest(folder: Path, manifest: DrafterManifest) -> None:
    """Write draftloop.json of a folder that is being written."""
    text = json.dumps(asdict(manifest), indent=2, sort_keys=True) + "\n"
    (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")


def check_writable(folder: Path) -> None:
    """Raise a ValueError if `folder` holds anything already."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty: choose another folder or remove it")


def is_drafter_folder(folder: str | Path) -> bool:
    """Whether `folder` was written by `write_drafter`."""
    return (Path(folder) / MANIFEST_NAME).is_file()


def read_manifest(folder: str | Path) -> DrafterManifest:
    """The manifest of a drafter folder.

    Raises:
        ValueError: if there is none, or it is not one this version reads.
    """
    path = Path(folder) / MANIFEST_NAME
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {MANIFEST_NAME}: expected a folder made by write_drafter"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON (line {error.lineno}): {error.msg}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object: export the drafter again")
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version {version}, this version reads {FORMAT_VERSION}: "
            "export the drafter again"
        )
    target = _made(TargetRecord, content.pop("target", {}), path)
    return _made(DrafterManifest, {**content, "target": target}, path)


class TargetIdentity(Protocol):
    """What of a target a drafter's record is compared with."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def real_vocab_size(self) -> int: ...


def check_target(manifest: DrafterManifest, target: TargetIdentity, tokenizer_hash: str) -> None:
    """Raise a ValueError if the drafter was trained for another target than the one at hand."""
    trained = manifest.target
    pairs = [
        ("fingerprint", trained.fingerprint, target.fingerprint),
        ("real vocabulary size", trained.real_vocab_size, target.real_vocab_size),
        ("tokenizer hash", manifest.tokenizer_hash, tokenizer_hash),
    ]
    for what, ours, theirs in pairs:
        if ours and theirs and ours != theirs:
            raise ValueError(
                f"the drafter was trained for target {trained.name!r} ({what} {_short(ours)}), "
                f"the target at hand is {target.name!r} ({_short(theirs)}): "
                "load that target, or train a drafter for this one"
            )


def read_draft_vocab(folder: str | Path) -> Tensor | None:
    """[n] int64 target ids of a reduced output vocabulary; None if the folder has none.

    The file holds d2t, offsets: target id = draft id + d2t[draft id] (the EAGLE-3 convention). The
    folders of serving engines have it beside the weights.
    """
    d2t = None
    for name in (DRAFT_VOCAB_NAME, WEIGHTS_NAME):
        path = Path(folder) / name
        if d2t is None and path.is_file():
            try:
                with safe_open(path, "pt") as file:
                    d2t = file.get_tensor("d2t") if "d2t" in file.keys() else None  # noqa: SIM118
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged ({error}): copy it again") from None
    if d2t is None:
        return None
    return d2t + d2t.new_tensor(range(len(d2t)))


def _made(kind: type, content: dict[str, Any], path: Path) -> Any:
    unknown = sorted(set(content) - {entry.name for entry in fields(kind)})
    if unknown:
        raise ValueError(f"{path} has unknown keys {unknown}: expected those of {kind.__name__}")
    try:
        return kind(**content)
    except TypeError as error:
        raise ValueError(f"{path} is incomplete: {error}") from None


def _short(value: object) -> str:
    return str(value)[:12]


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        _sync_entry(path)
    _sync_entry(folder)


def _sync_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
