"""Facts for the record: which models, which machine, which versions."""

import os
import platform
import resource
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from eval.exactness import arithmetic_of
from eval.facts import DrafterFacts, SuiteFacts, TargetFacts
from eval.suites import EvalPrompt
from specdec_runtime.draft import Drafter
from specdec_runtime.model import CausalModel
from specdec_runtime.target import Target

FREE_KINDS = ("prompt_lookup", "suffix_lookup")


def engine_of(model: CausalModel) -> str:
    """ "native" for the C++ decoder, else how transformers' code is run."""
    if not hasattr(model, "module"):
        return "native"
    return "compiled" if getattr(model, "static", False) else "eager"


def target_facts(target: Target) -> TargetFacts:
    """See `TargetFacts`."""
    return TargetFacts(
        name=target.name or "model in memory",
        revision=target.revision or None,
        fingerprint=target.fingerprint,
        engine=engine_of(target.model),
        dtype=arithmetic_of(target.model),
        num_layers=target.model.num_layers,
        hidden_size=target.model.hidden_size,
        vocab_size=target.real_vocab_size,
    )


def drafter_facts(name: str, drafter: Drafter, folder: str | None) -> DrafterFacts:
    """See `DrafterFacts`; a kind is a module of specdec_runtime.drafters."""
    kind = type(drafter).__module__.rpartition(".")[2]
    return DrafterFacts(name=name, kind=kind, folder=folder, free=kind in FREE_KINDS)


def suite_facts(name: str, prompts: Sequence[EvalPrompt], num_too_long: int) -> SuiteFacts:
    """See `SuiteFacts`."""
    categories: dict[str, int] = {}
    for prompt in prompts:
        if prompt.category is not None:
            categories[prompt.category] = categories.get(prompt.category, 0) + 1
    return SuiteFacts(
        name=name,
        num_prompts=len(prompts),
        num_too_long=num_too_long,
        mean_prompt_tokens=sum(len(p.token_ids) for p in prompts) / len(prompts),
        categories=categories,
    )


def machine_facts() -> dict[str, str]:
    """Processor, cores, accelerator, threads and versions."""
    facts = {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "torch threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if torch.cuda.is_available():
        facts["accelerator"] = torch.cuda.get_device_name()
    return facts


def peak_memory() -> str:
    """Most memory that this process has held so far, models and caches included."""
    held = f"{_peak_resident_bytes() / 2**30:.2f} GiB"
    if torch.cuda.is_available():
        held += f", {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB on the accelerator"
    return held


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024  # macOS counts bytes


def _processor() -> str:
    """The CPU's name as Linux gives it, else what Python knows."""
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
