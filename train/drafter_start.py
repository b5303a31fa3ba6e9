"""The drafter before its first step, made from the target, and the same one again on resume.

What was computed while making it (the fitted head) is kept in the run folder: recomputing it on
another number of threads would give other last bits, and frozen weights are in no checkpoint.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from distill.draft_vocab import DraftVocab, full_vocab, most_frequent
from distill.objectives import causal_lm
from distill.signals import TargetHead
from specdec_runtime.loading import load_module
from train.job import Job
from train.material import Material
from train.processes import on_main

COMPUTED = "start.safetensors"
KIND = "causal_lm"


@dataclass(frozen=True)
class Start:
    """The drafter's module in float32, and the target's frozen head over its vocabulary."""

    module: PreTrainedModel
    vocab: DraftVocab
    target_head: TargetHead
    target_dtype: torch.dtype

    @property
    def head_rows(self) -> torch.Tensor | None:
        """[n] target ids that the drafter can propose; None = all."""
        return None if self.vocab.is_full else self.vocab.token_ids

    @property
    def vocab_tensors(self) -> dict[str, torch.Tensor] | None:
        """What draft_vocab.safetensors holds; None without a reduced vocabulary."""
        return None if self.vocab.is_full else {"d2t": self.vocab.d2t, "t2d": self.vocab.t2d}

    @property
    def fingerprint(self) -> str:
        """Of the draft vocabulary; a checkpoint of another one is another drafter."""
        return hashlib.sha256(self.vocab.token_ids.numpy().tobytes()).hexdigest()[:16]


def start_drafter(job: Job, material: Material) -> Start:
    """Makes the drafter, or makes it again as it was when the run started."""
    draft, target = job.config.draft, material.target
    module_of_target = load_module(target.source, device="cpu")
    vocab = draft_vocab(material, draft.draft_vocab_size)
    module = causal_lm.make_module(module_of_target, draft.layers)
    head = TargetHead.of(module_of_target, vocab, real_vocab_size=target.real_vocab_size)
    head.check(material.answers.answers[0].rows)
    made = dict(module.named_parameters(remove_duplicate=False))

    def fit() -> None:
        if not (job.run_dir / COMPUTED).exists():
            with job.progress("fitting the drafter's head"):
                causal_lm.fit_head(module, material.answers.answers)
            _keep_computed(module, made, job.run_dir / COMPUTED)

    if draft.fit_head:
        on_main(job.accelerator, fit)
        load_computed(module, job.run_dir / COMPUTED)
    return Start(module, vocab, head, module_of_target.dtype)


def draft_vocab(material: Material, size: int | None) -> DraftVocab:
    """The tokens that the drafter can propose, from what the target wrote."""
    target = material.target
    real, rows = target.real_vocab_size, target.model.vocab_size
    if size is None or size >= real:
        return full_vocab(real, target_size=rows)
    always = {*target.eos_token_ids, *material.template.special_ids()}
    return most_frequent(material.answers.token_counts(), size, always=always, real_size=real)


def _keep_computed(module: nn.Module, made: dict[str, nn.Parameter], path: Path) -> None:
    """Writes the parameters that replaced those that the target gave."""
    now = dict(module.named_parameters(remove_duplicate=False))
    computed = {
        name: parameter.detach().contiguous()
        for name, parameter in now.items()
        if parameter is not made[name]
    }
    temporary = path.with_name(f".{path.name}.tmp")
    save_file(computed, temporary)
    temporary.replace(path)


def load_computed(module: PreTrainedModel, path: Path) -> None:
    """Puts them into a drafter that was just made, frozen."""
    for name, tensor in load_file(path).items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
    head, embeddings = module.get_output_embeddings(), module.get_input_embeddings()
    module.config.tie_word_embeddings = head.weight is embeddings.weight
