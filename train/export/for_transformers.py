"""transformers: an `assistant_model` folder for assisted generation."""

from pathlib import Path

import torch

from train.export.plain import check_plain, plain_obstacle, write_plain
from train.export.source import Source, TargetFacts

NAME = "transformers"


def obstacle(source: Source) -> str | None:
    if source.kind == "parallel":
        return (
            "transformers' block drafters score with the target's whole head and without a table of "
            "what follows the token before"
        )
    return plain_obstacle(source)


def write(source: Source, folder: Path, *, dtype: torch.dtype | None) -> None:
    write_plain(source, folder, dtype=dtype, engine=NAME)


def check(folder: Path, target: TargetFacts) -> list[str]:
    return check_plain(folder, target, NAME)


def launch(folder: Path, target: TargetFacts, num_draft_tokens: int) -> str:
    """Python; the draft length is in the folder's generation configuration.

    No assistant_tokenizer: the vocabularies are equal, and passing one would translate every token.
    """
    return "\n".join(
        (
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f"tokenizer = AutoTokenizer.from_pretrained({target.name!r})",
            f"target = AutoModelForCausalLM.from_pretrained({target.name!r})",
            f"drafter = AutoModelForCausalLM.from_pretrained({str(folder)!r})",
            'inputs = tokenizer("...", return_tensors="pt")',
            "target.generate(**inputs, assistant_model=drafter, do_sample=False)",
        )
    )
