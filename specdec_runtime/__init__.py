"""Lossless speculative decoding: any transformers target, any drafter, batches, every setting.

    from specdec_runtime import SpeculativeDecoder, load_drafter, load_target

    target = load_target("HuggingFaceTB/SmolLM2-135M-Instruct")
    decoder = SpeculativeDecoder(target, load_drafter("lookup", target), num_draft_tokens=4)
    print(decoder.generate(["The capital of France is"], max_new_tokens=32).text())

Names are imported when they are first used: importing this package imports no torch.
"""

# ruff: noqa: F401  (the imports below are for type checkers and editors)

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_runtime.decode import Rule, SpeculativeDecoder
    from specdec_runtime.draft import Draft, Drafter, DraftSession
    from specdec_runtime.draft_length import ConfidenceThreshold, CostAware, FixedLength
    from specdec_runtime.drafters.causal_lm import CausalLMDrafter
    from specdec_runtime.drafters.prompt_lookup import PromptLookupDrafter
    from specdec_runtime.engines import Engine
    from specdec_runtime.formats import DrafterManifest, read_manifest, write_drafter
    from specdec_runtime.hf_model import HFModel
    from specdec_runtime.loading import load_drafter, load_module, load_target
    from specdec_runtime.model import Cache, CausalModel, ModelOutput
    from specdec_runtime.results import Chunk, Generation, Round
    from specdec_runtime.sampling import Sampler, SamplingSettings
    from specdec_runtime.stats import AcceptanceStats
    from specdec_runtime.target import Target
    from specdec_runtime.text import TextStream

_HOMES = {
    "AcceptanceStats": "stats",
    "Cache": "model",
    "CausalLMDrafter": "drafters.causal_lm",
    "CausalModel": "model",
    "Chunk": "results",
    "ConfidenceThreshold": "draft_length",
    "CostAware": "draft_length",
    "Draft": "draft",
    "DraftSession": "draft",
    "Drafter": "draft",
    "DrafterManifest": "formats",
    "Engine": "engines",
    "FixedLength": "draft_length",
    "Generation": "results",
    "HFModel": "hf_model",
    "ModelOutput": "model",
    "PromptLookupDrafter": "drafters.prompt_lookup",
    "Round": "results",
    "Rule": "decode",
    "Sampler": "sampling",
    "SamplingSettings": "sampling",
    "SpeculativeDecoder": "decode",
    "Target": "target",
    "TextStream": "text",
    "load_drafter": "loading",
    "load_module": "loading",
    "load_target": "loading",
    "read_manifest": "formats",
    "write_drafter": "formats",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
