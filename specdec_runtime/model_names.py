"""From what a user calls a model to what transformers loads: a complete folder, or a hub id.

Known here are the names of the targets that Draftloop brings along (fetched or made once into the
user's cache), folders, GGUF files (converted once into the cache) and hub ids. A drafter folder
records its target by this name, which therefore means the same on every machine.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from specdec_runtime.assets import SMOLLM2, cache_folder, fetch
from specdec_runtime.file_lock import exclusive
from specdec_runtime.gguf_folder import convert_gguf
from specdec_runtime.missing_folder import missing_folder
from specdec_runtime.tiny_target import NAME as TINY_TARGET
from specdec_runtime.tiny_target import tiny_target

log = logging.getLogger(__name__)

DEFAULT_TARGET = "smollm2-135m-instruct"
# Part of the cached folder's name: what an older converter wrote is not reused.
_CONVERTER_VERSION = 1


def resolve_model(name: str | Path) -> str:
    """A local folder, or a hub id handed through unchanged.

    Args:
        name: one of `embedded_models`, a hub id, a folder, or the path of a .gguf file.

    Raises:
        ValueError: if a folder or file does not exist or lacks what a model needs.
    """
    if name in embedded_models():
        return str(embedded_models()[str(name)]())
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"{name}: no such file; expected the path of a GGUF file")
        return str(_converted(path, f"{path.stem}-{_digest(path)}"))
    if path.is_dir():
        check_folder(path)
        return str(path)
    if problem := missing_folder(name):
        raise ValueError(
            f"{problem}; expected a folder, a .gguf file, a hub id (owner/name) or "
            f"one of {', '.join(embedded_models())}"
        )
    return str(name)


def portable_name(name: str | Path) -> str:
    """The name to record: as given, or the whole path of what lies on this machine only."""
    path = Path(name).expanduser()
    is_local = path.exists() and name not in embedded_models()
    return str(path.resolve()) if is_local else str(name)


def embedded_models() -> Mapping[str, Callable[[], Path]]:
    """Targets that need no hub: what makes each one's folder, or finds it made."""
    return {
        DEFAULT_TARGET: lambda: _converted(fetch(SMOLLM2), DEFAULT_TARGET),
        TINY_TARGET: tiny_target,
    }


def check_folder(folder: Path) -> None:
    """Whether a folder holds a whole model: configuration, weights and tokenizer.

    Raises:
        ValueError: naming what is missing.
    """
    wanted = {
        "configuration (config.json)": ["config.json"],
        "weights (*.safetensors)": ["*.safetensors", "pytorch_model*.bin"],
        "tokenizer (tokenizer.json)": ["tokenizer.json", "*.model", "vocab.*", "*.tiktoken"],
    }
    missing = [
        what
        for what, patterns in wanted.items()
        if not any(any(folder.glob(pattern)) for pattern in patterns)
    ]
    if missing:
        raise ValueError(
            f"{folder} has no {' and no '.join(missing)}: expected a complete Hugging "
            "Face model folder, as save_pretrained of model and tokenizer writes it"
        )


def _converted(source: Path, name: str) -> Path:
    folder = cache_folder() / "targets" / f"{name}-v{_CONVERTER_VERSION}"
    if folder.is_dir():
        return folder
    with exclusive(folder.parent / f"{folder.name}.lock"):
        if not folder.is_dir():
            log.info("converting %s to a Hugging Face folder (once, about half a minute)", source)
            convert_gguf(source, folder)
    return folder


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()[:12]
