"""The drafter before its first step, made from the target, and the same one again on resume.

What was computed while making it (a fitted head) is kept in the run folder: recomputing it on
another number of threads would give other last bits, and frozen weights are in no checkpoint.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from distill.batches import Example
from distill.draft_vocab import DraftVocab, full_vocab, most_frequent
from distill.recipe import DraftSettings, Recipe, TargetParts, make_recipe
from distill.signals import TargetHead, TargetRows
from specdec_runtime.loading import load_module
from train.features import with_features
from train.job import Job
from train.material import Material
from train.processes import on_main
from train.signals import with_states

COMPUTED = "start.safetensors"
# Of the target's states, read for a start where they were not recorded; more of them change little.
SOLVED_POSITIONS = 30_000


@dataclass(frozen=True)
class Start:
    """The drafter under training, the tokens it can propose, and how the target is stored.

    examples: what it learns from, with the target's inner states where it reads them.
    """

    recipe: Recipe
    examples: Sequence[Example]
    vocab: DraftVocab
    target_dtype: torch.dtype

    @property
    def vocab_tensors(self) -> dict[str, Tensor] | None:
        """What draft_vocab.safetensors holds; None without a reduced vocabulary, and where the drafter
        numbers tokens in its own way."""
        if self.vocab.is_full or self.recipe.tokenizer is not None:
            return None
        return {"d2t": self.vocab.d2t, "t2d": self.vocab.t2d}

    @property
    def fingerprint(self) -> str:
        """Of the draft vocabulary; a checkpoint of another one is another drafter."""
        return hashlib.sha256(self.vocab.token_ids.numpy().tobytes()).hexdigest()[:16]


def start_drafter(job: Job, material: Material) -> Start:
    """Makes the drafter, or makes it again as it was when the run started."""
    draft, target = job.config.draft, material.target
    module_of_target = load_module(target.source, device="cpu")
    vocab = draft_vocab(material, draft)
    head = TargetHead.of(module_of_target, vocab, real_vocab_size=target.real_vocab_size)
    answers = material.answers.answers
    first = with_states(target, answers[:1], max_positions=1)[0].rows
    assert isinstance(first, TargetRows)
    head.check(first)
    recipe = make_recipe(draft, TargetParts(target, module_of_target, vocab, head))
    examples = with_features(job, target, recipe.feature_layers, material.examples)

    def solve() -> None:
        if not (job.run_dir / COMPUTED).exists():
            with job.progress("what the drafter starts from"):
                known = with_features(job, target, recipe.feature_layers, answers)
                computed = recipe.solve_start(
                    with_states(target, known, max_positions=SOLVED_POSITIONS)
                )
            keep_computed(computed, job.run_dir / COMPUTED)

    on_main(job.accelerator, solve)
    recipe.put_start(load_file(job.run_dir / COMPUTED))
    return Start(recipe, examples, vocab, module_of_target.dtype)


def draft_vocab(material: Material, draft: DraftSettings) -> DraftVocab:
    """The tokens that the drafter can propose, from what the target wrote."""
    target, size = material.target, draft.draft_vocab_size
    real, rows = target.real_vocab_size, target.model.vocab_size
    if (fixed := draft.fixed_tokens(target.tokenizer)) is not None:
        return DraftVocab(fixed, rows)
    if size is None or size >= real:
        return full_vocab(real, target_size=rows)
    always = {*target.eos_token_ids, *material.template.special_ids()}
    return most_frequent(material.answers.token_counts(), size, always=always, real_size=real)


def keep_computed(computed: dict[str, Tensor], path: Path) -> None:
    """Writes what was computed; it appears complete or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    save_file({name: tensor.contiguous() for name, tensor in computed.items()}, temporary)
    temporary.replace(path)
