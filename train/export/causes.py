"""Why an exported drafter may be accepted less: each usual cause looked at, with what was found."""

from collections.abc import Sequence
from pathlib import Path

from specdec_runtime.formats import is_drafter_folder
from specdec_runtime.tokenizers import template_hash
from train.export.gguf_vocabulary import adds_bos
from train.export.registry import Format
from train.export.source import Source

# cause -> words that a problem of `check` about it has
_WORDS: dict[str, Sequence[str]] = {
    "layer ids": ("layers", "layer_ids"),
    "offsets": ("d2t", "t2d"),
    "vocabulary padding": ("vocab_size", "tokens, the target"),
    "norm flags": ("norm_", "fc_norm"),
    "tied head": ("tie_word_embeddings",),
    "rope": ("rope",),
    "dtype": ("dtype",),
    "window": ("max_position_embeddings", "sliding_window", "context_length"),
    "weights": ("tensor ", "cut off", "damaged"),
    "tokenizer": ("tokenizer", "token "),
}


def likely_causes(source: Source, folder: Path, chosen: Format) -> list[str]:
    """One line a cause: "as exported", or what is wrong."""
    try:
        problems = chosen.check(folder, source.target)
    except ValueError as error:
        problems = [str(error)]
    lines = [_template(source), _bos(source)]
    for cause, words in _WORDS.items():
        found = [problem for problem in problems if any(word in problem for word in words)]
        lines.append(f"{cause}: {found[0] if found else 'as exported'}")
    return lines


def _template(source: Source) -> str:
    if not is_drafter_folder(source.files.folder):
        return "template: none recorded with the drafter"
    recorded, found = source.manifest.template_hash, template_hash(source.target.tokenizer)
    same = recorded == found
    return f"template: {'the one of training' if same else 'another than in training'}"


def _bos(source: Source) -> str:
    doubles = adds_bos(source.target.tokenizer) and bool(source.target.tokenizer.chat_template)
    return (
        "BOS: the tokenizer adds one, check that the template does not add a second"
        if doubles
        else "BOS: none is added"
    )
