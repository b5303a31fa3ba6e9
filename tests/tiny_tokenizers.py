"""Small tokenizers made in memory: byte-level BPE with whatever words are asked for."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_level_tokenizer(words=(), *, specials=("<|end|>",), eos="<|end|>", reverse=False):
    """One token a byte (256 ids), then `words`, then the special tokens.

    Args:
        words: tokens of several bytes, each reachable by merging from the left.
        reverse: the bytes in reverse order of id: another tokenizer of the same size.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=reverse)
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    merges = []
    for word in words:
        symbols = word.replace(" ", "\u0120")
        for end in range(2, len(symbols) + 1):
            if symbols[:end] not in vocab:
                vocab[symbols[:end]] = len(vocab)
                merges.append((symbols[: end - 1], symbols[end - 1]))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    tokenizer.add_special_tokens({"additional_special_tokens": list(specials)})
    return tokenizer
