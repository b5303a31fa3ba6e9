"""What a folder of signals was made with: equal fingerprints mean equal signals for equal texts.

The fingerprint covers the target's weights and dtype, the form with its settings, and the answers'
own fingerprint. How many answers there are is not in it: a folder is continued when there are more,
and each text is known by a hash of its tokens. Nothing of training is in it.
"""

from distill.manifests import FolderKind, Manifest
from distill.signal_forms import SignalForm, SignalsConfig
from specdec_runtime.target import Target
from specdec_runtime.tokenizers import tokenizer_hash

SIGNALS = FolderKind("signals", format_version=1)


def make_manifest(target: Target, config: SignalsConfig, *, answers_fingerprint: str) -> Manifest:
    """Everything that decides the signals of a text.

    Args:
        answers_fingerprint: of the manifest of the folder that the texts are in.
    """
    manifest = {
        "format_version": SIGNALS.format_version,
        "target": target.name,
        "target_revision": target.revision,
        "target_fingerprint": target.fingerprint,
        "target_dtype": str(target.model.dtype).removeprefix("torch."),
        "real_vocab_size": target.real_vocab_size,
        "hidden_size": target.model.hidden_size,
        "tokenizer_hash": tokenizer_hash(target.tokenizer),
        "answers_fingerprint": answers_fingerprint,
        "form": config.form.value,
        "dtype": config.dtype.value,
    }
    if config.form is SignalForm.sparse:
        manifest |= {"top_k": config.top_k, "draws": config.draws, "seed": config.seed}
    return manifest


def bytes_per_position(target: Target, config: SignalsConfig) -> int:
    """What a shard holds of one position."""
    number = config.dtype.torch.itemsize
    if config.form is SignalForm.hidden:
        return target.model.hidden_size * number + 8  # log-sum-exp and argmax, four bytes each
    id_bytes = 2 if target.real_vocab_size <= 1 << 16 else 4
    top_k = min(config.top_k, target.real_vocab_size)
    return top_k * (id_bytes + number) + config.draws * id_bytes + 12
