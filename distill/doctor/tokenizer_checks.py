"""Whether the tokenizer gives texts back, and means what the target's head means."""

from collections.abc import Iterator

from distill.doctor.finding import Finding, Level
from distill.templates import ChatTemplate

# Leading and doubled spaces, code, digits, other scripts, combined characters.
SAMPLES = (
    "Hello, world!",
    " leading and  doubled spaces ",
    "def f(x):\n    return [x, 1234567890]\n\n\t# tab",
    "caf\u00e9 na\u00efve \u4f60\u597d \u0440\u0443\u0441 \U0001f600 e\u0301",
)


def check_tokenizer(
    template: ChatTemplate, *, vocab_size: int, real_vocab_size: int
) -> Iterator[Finding]:
    """Findings on the tokenizer beside the size of the target's head."""
    tokenizer = template.tokenizer
    for sample in SAMPLES:
        ids = template.encode(sample)
        back = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        if back != sample:
            same_but_space = "".join(back.split()) == "".join(sample.split())
            yield Finding(
                Level.warning if same_but_space else Level.error,
                "round_trip",
                f"the tokenizer reads {sample!r} and gives back {back!r}",
                "spaces alone are the habit of some tokenizers; otherwise its files do not fit this "
                "version of transformers: fetch them again, or use the version they were made with",
            )
            break
    if real_vocab_size > vocab_size:
        yield Finding(
            Level.error,
            "head_too_small",
            f"the tokenizer has ids up to {real_vocab_size - 1}, the target's head {vocab_size} rows",
            "tokens were added and the model was not resized; use the tokenizer that it came with",
        )
    elif real_vocab_size < vocab_size:
        yield Finding(
            Level.note,
            "padded_head",
            f"the last {vocab_size - real_vocab_size} of {vocab_size} rows of the head are padding "
            "and are never proposed",
        )
