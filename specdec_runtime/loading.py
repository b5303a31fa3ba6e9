"""Loading targets and drafters, and the checks that they fit each other.

Everything transformers loads is a target: hub ids, folders, GGUF files, quantised weights, models
spread by `device_map`. The distribution that is kept is that of the target as loaded.
"""

import importlib
import math
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from specdec_runtime import drafters
from specdec_runtime.draft import Drafter
from specdec_runtime.engines import Engine, make_model
from specdec_runtime.fingerprint import folder_fingerprint
from specdec_runtime.formats import check_target, is_drafter_folder, read_manifest
from specdec_runtime.model_names import portable_name, resolve_model
from specdec_runtime.pretrained import load_module, load_tokenizer
from specdec_runtime.target import Target, end_of_text_ids, warn_of_defaults
from specdec_runtime.tokenizers import (
    check_round_trip,
    real_vocab_size,
    tokenizer_hash,
    unused_token_ids,
)

__all__ = ["Target", "load_drafter", "load_module", "load_target"]


def load_target(
    name: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "auto",
    engine: Engine | str = Engine.auto,
    revision: str | None = None,
    model_arguments: Mapping[str, Any] | None = None,
) -> Target:
    """Load the model whose output is to be kept exactly.

    Args:
        name: hub id, folder, GGUF file, or a target that Draftloop brings along ("tiny-random",
            "smollm2-135m-instruct"); see `resolve_model`.
        dtype: "auto" = as stored; on CUDA bfloat16 where float32 is stored.
        device: "auto" = CUDA if present, else CPU; "spread" = over all devices that there are.
        engine: see `Engine`.
        revision: of the hub repository.
        model_arguments: further arguments of `from_pretrained`: quantization_config, device_map,
            attn_implementation, ...

    Raises:
        ValueError: if there is no such model, no tokenizer, or it cannot be decoded here.
    """
    source = resolve_model(name)
    _refuse_drafter(source)
    module = load_module(
        source, dtype=dtype, device=device, revision=revision, model_arguments=model_arguments
    )
    tokenizer = load_tokenizer(source, revision=revision)
    check_round_trip(tokenizer)
    folder = _local_folder(source, revision)
    model = make_model(module, engine=engine)
    warn_of_defaults(module.generation_config)
    real = real_vocab_size(tokenizer)
    if real > model.vocab_size:
        raise ValueError(
            f"{name}: the tokenizer has ids up to {real - 1}, the model only {model.vocab_size} "
            "rows: expected the model's own tokenizer"
        )
    return Target(
        model=model,
        tokenizer=tokenizer,
        name=portable_name(name),
        source=source,
        revision=_revision(folder),
        fingerprint=folder_fingerprint(folder),
        eos_token_ids=end_of_text_ids(module.generation_config, module.config),
        real_vocab_size=real,
        unused_token_ids=unused_token_ids(tokenizer),
    )


def load_drafter(
    spec: str | Path, target: Target, *, engine: Engine | str = Engine.auto, **settings: Any
) -> Drafter | None:
    """Load a drafter for `target`.

    Args:
        spec: "none" (plain decoding, returns None); a kind that needs no files ("suffix_lookup",
            "early_exit", "lookup" for short of "prompt_lookup"); a drafter folder; a folder or
            hub id of any causal LM with the target's tokenizer; or KIND:FOLDER to have a model
            used in another way ("cross_tokenizer:...", "composite:...").
        engine: see `Engine`.
        settings: of the kind (`SETTINGS` of its module), replacing those stored in the folder.

    Raises:
        ValueError: if there is no such drafter, it does not fit the target, or it has no such
            setting.
    """
    if spec == "none":
        return None
    if not isinstance(spec, str | Path) or not str(spec):
        raise ValueError(
            f"the drafter is {spec!r}, expected none, a kind ({', '.join(drafter_kinds())}), a "
            "folder, a hub id, or KIND:FOLDER"
        )
    kinds = drafter_kinds()
    kind, _, source = str(spec).partition(":")
    kind = "prompt_lookup" if kind == "lookup" else kind
    if kind in kinds and not Path(spec).exists():
        _check_settings(kind, settings)
        return _kind_module(kind).load(source or None, target, engine=engine, settings=settings)
    if is_drafter_folder(spec):
        manifest = read_manifest(spec)
        if manifest.kind not in kinds:
            raise ValueError(
                f"{spec} holds a drafter of kind {manifest.kind!r}, this version knows "
                f"{', '.join(kinds)}"
            )
        _check_settings(manifest.kind, settings)
        hashed = tokenizer_hash(target.tokenizer) if target.tokenizer is not None else ""
        check_target(manifest, target, hashed)
        stored = {**manifest.kind_config, **settings}
        if (temperature := manifest.recommended.get("draft_temperature")) is not None:
            stored.setdefault("temperature", temperature)
        return _kind_module(manifest.kind).load(spec, target, engine=engine, settings=stored)
    _check_settings("causal_lm", settings)
    return _kind_module("causal_lm").load(spec, target, engine=engine, settings=settings)


def drafter_kinds() -> list[str]:
    """Names of the drafter kinds: the modules of specdec_runtime.drafters."""
    return [module.name for module in pkgutil.iter_modules(drafters.__path__)]


def _kind_module(kind: str) -> Any:
    """The kind's module; its `load(folder, target, *, engine, settings)` makes the drafter, and its
    `SETTINGS` are the names that these may have (None = those of the drafter behind it)."""
    return importlib.import_module(f"specdec_runtime.drafters.{kind}")


def _check_settings(kind: str, settings: Mapping[str, Any]) -> None:
    known = _kind_module(kind).SETTINGS
    for name in settings:
        if known is not None and name not in known:
            raise ValueError(
                f"{name} is no setting of a {kind} drafter: expected {', '.join(sorted(known))}"
            )
    temperature = settings.get("temperature")
    if temperature is not None and not (
        isinstance(temperature, int | float) and 0.0 <= temperature < math.inf
    ):
        raise ValueError(f"the draft temperature is {temperature!r}, expected 0 or more")


def _refuse_drafter(source: str) -> None:
    """A head on another model's states is no target; a standalone drafting model may be one."""
    if is_drafter_folder(source) and (manifest := read_manifest(source)).kind != "causal_lm":
        raise ValueError(
            f"{source} holds a drafter of kind {manifest.kind!r}, which is no model by itself: load "
            f"its target {manifest.target.name!r}, and this folder with load_drafter"
        )


def _local_folder(name: str, revision: str | None) -> Path:
    """Where the weights lie on this machine."""
    if Path(name).exists():
        return Path(name)
    config = cached_file(name, "config.json", revision=revision or "main")
    assert config is not None, "the model has just been loaded from there"
    return Path(config).parent


def _revision(folder: Path) -> str:
    """The commit in a hub cache path .../snapshots/COMMIT; "" elsewhere."""
    return folder.name if folder.parent.name == "snapshots" else ""
