"""llama.cpp: one GGUF file with the tokenizer in it, given to `llama-server` as the draft model."""

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader

from specdec_runtime.formats import is_drafter_folder, read_manifest, write_manifest
from specdec_runtime.gguf_tokenizer import pre_tokenizer_name
from train.export import rules
from train.export.gguf_model import model_obstacle, write_gguf
from train.export.gguf_vocabulary import tokens_and_types, vocabulary_obstacle
from train.export.plain import plain_module, plain_obstacle
from train.export.record import served
from train.export.source import Source, TargetFacts

NAME = "llamacpp"
FILE = "drafter.gguf"


def obstacle(source: Source) -> str | None:
    if reason := plain_obstacle(source):
        return reason
    reason = model_obstacle(source.config)
    return reason or vocabulary_obstacle(source.target.tokenizer)


def write(source: Source, folder: Path, *, dtype: torch.dtype | None) -> None:
    module = plain_module(source, dtype)
    path = folder / FILE
    write_gguf(module, source.target.tokenizer, path, name=f"drafter for {source.target.record}")
    manifest = served(source, NAME, {})
    manifest.served["forward"] = _settings(_fields(GGUFReader(str(path))))
    write_manifest(folder, manifest)


def check(folder: Path, target: TargetFacts) -> list[str]:
    path = folder / FILE
    if not path.is_file():
        return [f"{FILE} is missing"]
    try:
        reader = GGUFReader(str(path))
        fields = _fields(reader)
    except (ValueError, IndexError, KeyError) as error:
        return [f"{FILE} is no readable GGUF file ({error}): export again"]
    problems = [*rules.recorded_target(folder, target), *_weights(reader, path, fields)]
    tokens, types = tokens_and_types(target.tokenizer, target.vocab_size)
    found = fields.get("tokenizer.ggml.tokens", [])
    if len(found) != target.vocab_size:
        problems.append(
            f"it has {len(found)} tokens, the target {target.vocab_size}: llama.cpp wants the same "
            "vocabulary; pad with rows that cannot win"
        )
    elif found != tokens:
        first = next(i for i in range(len(tokens)) if found[i] != tokens[i])
        problems.append(f"token {first} is {found[first]!r}, the target's is {tokens[first]!r}")
    elif fields.get("tokenizer.ggml.token_type") != types:
        problems.append("its token types are not the target's: control tokens would be text")
    if fields.get("tokenizer.ggml.pre") != pre_tokenizer_name(target.tokenizer):
        problems.append(
            f"tokenizer.ggml.pre is {fields.get('tokenizer.ggml.pre')!r}, the target's tokenizer "
            f"splits text like {pre_tokenizer_name(target.tokenizer)!r}"
        )
    return [*problems, *_differences(folder, fields)]


def launch(folder: Path, target: TargetFacts, num_draft_tokens: int) -> str:
    return (
        f"llama-server -m TARGET.gguf -md {folder / FILE} --spec-type draft-simple "
        f"--spec-draft-n-max {num_draft_tokens} --spec-draft-n-min 0 --spec-draft-p-min 0"
    )


def _fields(reader: GGUFReader) -> dict[str, Any]:
    return {key: field.contents() for key, field in reader.fields.items()}


def _settings(fields: dict[str, Any]) -> dict[str, Any]:
    """The metadata that changes what the model computes."""
    return {
        key: value
        for key, value in fields.items()
        if key == "general.architecture" or key.startswith(f"{fields['general.architecture']}.")
    }


def _weights(reader: GGUFReader, path: Path, fields: dict[str, Any]) -> list[str]:
    names = {tensor.name for tensor in reader.tensors}
    arch = fields.get("general.architecture", "")
    problems = []
    if f"{arch}.rope.freq_base" not in fields:
        problems.append(f"{arch}.rope.freq_base is missing: llama.cpp would assume 10000")
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    wanted = {"token_embd.weight", "output_norm.weight"} | {
        f"blk.{layer}.{part}.weight"
        for layer in range(fields.get(f"{arch}.block_count", 0))
        for part in (*parts, "attn_norm", "ffn_norm")
    }
    problems += [f"tensor {name} is missing" for name in sorted(wanted - names)]
    end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
    if path.stat().st_size < end:
        problems.append(f"{path.name} is cut off: {path.stat().st_size} of {end} bytes")
    return problems


def _differences(folder: Path, fields: dict[str, Any]) -> list[str]:
    if not is_drafter_folder(folder):
        return []
    recorded = read_manifest(folder).served.get("forward", {})
    found = _settings(fields)
    return [
        f"the file says {key}={found.get(key)}, the drafter was exported with {recorded.get(key)}"
        for key in sorted(recorded.keys() | found.keys())
        if recorded.get(key) != found.get(key)
    ]
