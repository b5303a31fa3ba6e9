"""From what a user calls a target to a plain Hugging Face folder.

`resolve_target` takes the name of the embedded default, a hub id, a local folder or a GGUF file.
GGUF files are converted once into the user's cache: weights in bfloat16, the tokenizer repaired
(gguf_tokenizer.py), and no trace of the conversion left in the configuration, so that any program
reads the folder. A folder appears under its name only when it is complete.
"""

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path

import torch
from gguf import GGUFReader
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from distill.gguf_tokenizer import gguf_tokenizer
from distill.gguf_weights import LOADER_KEYS, gguf_model
from specdec_runtime.assets import SMOLLM2, cache_folder, fetch
from specdec_runtime.file_lock import exclusive

log = logging.getLogger(__name__)

DEFAULT_TARGET = "smollm2-135m-instruct"
# Part of the cached folder's name: what an older converter wrote is not reused.
_CONVERTER_VERSION = 1
_PROBES = (
    "Hello, world",
    "1. one\n\n2. two  3",
    "def f(x):\n    return x**2\n",
    "na\u00efve \u4f60\u597d",
)


def resolve_target(name: str) -> str:
    """A local folder, or a hub id handed through unchanged.

    Args:
        name: "smollm2-135m-instruct", a hub id, a folder, or the path of a .gguf file.

    Raises:
        ValueError: if a folder or file does not exist or lacks what a target needs.
    """
    if name == DEFAULT_TARGET:
        return str(_converted(fetch(SMOLLM2), DEFAULT_TARGET))
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"target.model={name}: no such file")
        return str(_converted(path, f"{path.stem}-{_digest(path)}"))
    if path.is_dir():
        check_folder(path)
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(
            f"target.model={name}: no such folder; expected a folder, a .gguf file, a hub id "
            f"(owner/name) or {DEFAULT_TARGET!r}"
        )
    return name


def check_folder(folder: Path) -> None:
    """Whether a folder holds a whole target: configuration, weights and tokenizer.

    Raises:
        ValueError: naming what is missing.
    """
    wanted = {
        "configuration (config.json)": ["config.json"],
        "weights (*.safetensors)": ["*.safetensors", "pytorch_model*.bin"],
        "tokenizer (tokenizer.json)": ["tokenizer.json", "tokenizer.model", "vocab.json"],
    }
    missing = [
        what
        for what, patterns in wanted.items()
        if not any(any(folder.glob(pattern)) for pattern in patterns)
    ]
    if missing:
        raise ValueError(
            f"target.model={folder} has no {' and no '.join(missing)}: expected a complete Hugging "
            "Face model folder, as save_pretrained of model and tokenizer writes it"
        )


def convert_gguf(source: Path, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes a GGUF model as a Hugging Face folder.

    Args:
        source: any architecture that transformers' GGUF loader knows.
        folder: must not exist yet.
        dtype: of the weights. Quantised blocks are multiplied out; bfloat16 keeps their accuracy.

    Raises:
        ValueError: if the file is damaged or holds no tokenizer or an unknown architecture.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    reader = _open(source)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    tokenizer = gguf_tokenizer(source, fields)
    model = gguf_model(source, reader, fields, dtype)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".convert-") as temporary:
        unfinished = Path(temporary) / folder.name
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        _clean_configs(unfinished)
        _check_tokenizer(tokenizer, AutoTokenizer.from_pretrained(unfinished))
        for path in unfinished.iterdir():
            _fsync(path)
        unfinished.rename(folder)
    _fsync(folder.parent)


def _converted(source: Path, name: str) -> Path:
    folder = cache_folder() / "targets" / f"{name}-v{_CONVERTER_VERSION}"
    if folder.is_dir():
        return folder
    with exclusive(folder.parent / f"{folder.name}.lock"):
        if not folder.is_dir():
            log.info("converting %s to a Hugging Face folder (once, about half a minute)", source)
            convert_gguf(source, folder)
    return folder


def _open(source: Path) -> GGUFReader:
    try:
        return GGUFReader(str(source))
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(
            f"{source} is not a readable GGUF file ({error}): fetch it again"
        ) from None


def _clean_configs(folder: Path) -> None:
    _edit(folder / "config.json", drop=LOADER_KEYS)
    # A class that transformers 4 and 5 both read straight from tokenizer.json.
    _edit(
        folder / "tokenizer_config.json",
        drop=frozenset({"is_local", "local_files_only", "backend"}),
        tokenizer_class="PreTrainedTokenizerFast",
    )


def _edit(path: Path, *, drop: frozenset[str], **values: str) -> None:
    settings = json.loads(path.read_text())
    settings = {key: value for key, value in settings.items() if key not in drop} | values
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _check_tokenizer(built: PreTrainedTokenizerBase, saved: PreTrainedTokenizerBase) -> None:
    """What is on disk has to give the ids that were built (case C7)."""
    for text in (*_PROBES, *built.all_special_tokens):
        expected, found = built(text).input_ids, saved(text).input_ids
        if expected != found:
            raise ValueError(
                f"the converted tokenizer turns {text!r} into {found}, expected {expected}: this "
                "version of transformers does not read its own file back; use another version"
            )


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()[:12]


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
