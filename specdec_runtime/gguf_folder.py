"""GGUF files as plain Hugging Face folders: weights in one dtype, the tokenizer repaired.

No trace of the conversion is left in the configuration, so that any program reads the folder. It
appears under its name only when it is complete.
"""

import json
import os
import tempfile
from pathlib import Path

import torch
from gguf import GGUFReader
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from specdec_runtime.gguf_tokenizer import gguf_tokenizer
from specdec_runtime.gguf_weights import LOADER_KEYS, gguf_model

_PROBES = (
    "Hello, world",
    "1. one\n\n2. two  3",
    "def f(x):\n    return x**2\n",
    "na\u00efve \u4f60\u597d",
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


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
