"""`target.model=tiny-random`: a real target folder of a few hundred kilobytes, made on the fly.

Byte-level tokenizer, chat template, four layers of random weights. It says nothing of worth, but
every stage treats it as any other target, so the whole loop runs in a minute without a network.
"""

import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec_runtime.assets import cache_folder

NAME = "tiny-random"
VERSION = 1  # part of the folder's name; another one is made anew
PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_target() -> Path:
    """The cached folder, made if it is not there; it appears complete or not at all."""
    folder = cache_folder() / "targets" / f"{NAME}-v{VERSION}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(temporary)
    random_llama(tokenizer).save_pretrained(temporary)
    try:
        temporary.rename(folder)
    except OSError:  # another process was faster; both made the same
        shutil.rmtree(temporary)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, three special tokens, a ChatML-like template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: number for number, token in enumerate([PAD, START, END, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        chat_template=TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def random_llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Weights of a fixed seed, large enough that greedy text is not one repeated token."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)
