"""A tiny target, drafters for it of each kind, and exported folders, as the export tests use them."""

import copy
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_runtime.eagle3_network import Eagle3Network, eagle3_config
from specdec_runtime.fingerprint import folder_fingerprint
from specdec_runtime.formats import (
    DRAFT_VOCAB_NAME,
    DrafterManifest,
    TargetRecord,
    write_drafter,
)
from specdec_runtime.parallel_network import ParallelNetwork, parallel_config
from specdec_runtime.tiny_target import TEMPLATE
from specdec_runtime.tokenizers import template_hash, tokenizer_hash
from tests.tiny_tokenizers import byte_level_tokenizer
from train.export.observation import QUESTIONS, Observation
from train.export.parity_process import answer
from train.export.source import read_target

DRAFT_VOCAB_SIZE = 120
SPARE = 8  # rows of a padded target's head that are no token
LAYER_IDS = [1, 2, 3]


def toy_tokenizer():
    """Bytes and a few words: llama.cpp wants merges."""
    specials = ("<|end|>", "<|im_start|>", "<|im_end|>")
    tokenizer = byte_level_tokenizer((" the", " and", "ing"), specials=specials)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def toy_llama(num_layers: int = 8) -> LlamaForCausalLM:
    """Random weights of a fixed seed, with a head size that every engine's attention takes."""
    return copy.deepcopy(_toy_llama(num_layers))


@cache
def _toy_llama(num_layers: int) -> LlamaForCausalLM:
    """Drawing the weights takes several times as long as copying them."""
    config = LlamaConfig(
        vocab_size=len(toy_tokenizer()),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=toy_tokenizer().eos_token_id,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def write_target(folder: Path) -> Path:
    tokenizer = toy_tokenizer()
    model = toy_llama()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def kept_tokens(target_size: int, seed: int = 0) -> Tensor:
    """Ascending target ids of a reduced vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(target_size, generator=generator)[:DRAFT_VOCAB_SIZE].sort().values


def vocab_tensors(token_ids: Tensor, target_size: int) -> dict[str, Tensor]:
    t2d = torch.zeros(target_size, dtype=torch.bool)
    t2d[token_ids] = True
    return {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": t2d}


def manifest(target: Path, kind: str) -> DrafterManifest:
    tokenizer = toy_tokenizer()
    return DrafterManifest(
        kind=kind,
        target=TargetRecord(
            name=str(target),
            fingerprint=folder_fingerprint(target),
            vocab_size=len(tokenizer),
            real_vocab_size=len(tokenizer),
        ),
        tokenizer_hash=tokenizer_hash(tokenizer),
        template_hash=template_hash(tokenizer),
        recommended={"num_draft_tokens": 3},
    )


def write_causal_lm(folder: Path, target: Path, *, reduced: bool = True) -> Path:
    """The target's first four layers, with or without a reduced vocabulary."""
    tokenizer = toy_tokenizer()
    module = toy_llama()
    module.config.num_hidden_layers = 4
    module.model.layers = module.model.layers[:4]
    tensors = None
    if reduced:
        ids = kept_tokens(len(tokenizer))
        tensors = {DRAFT_VOCAB_NAME: vocab_tensors(ids, len(tokenizer))}
    record = manifest(target, "causal_lm")
    return write_drafter(folder, module, record, tokenizer=tokenizer, tensors=tensors)


def write_eagle3(folder: Path, target: Path, *, norms: str = "eagle3") -> Path:
    """A random EAGLE-3 head whose embeddings are the target's."""
    tokenizer = toy_tokenizer()
    model = toy_llama()
    ids = kept_tokens(len(tokenizer))
    config = eagle3_config(
        copy.deepcopy(model.config),
        layer_ids=LAYER_IDS,
        draft_vocab_size=len(ids),
        num_heads=2,
        head_dim=64,
        intermediate_size=64,
        norms=norms,
    )
    config.initializer_range = 0.15
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = Eagle3Network(config)
    network.model.embed_tokens.weight.data.copy_(model.get_input_embeddings().weight)
    network.lm_head.weight.data.copy_(model.get_input_embeddings().weight[ids])
    tensors = {DRAFT_VOCAB_NAME: vocab_tensors(ids, len(tokenizer))}
    record = manifest(target, "eagle3")
    return write_drafter(folder, network, record, tokenizer=tokenizer, tensors=tensors)


def write_padded_target(folder: Path) -> Path:
    """Its padding is the mean of all rows, whose logit is never the largest: engines do not cut it off."""
    tokenizer, model = toy_tokenizer(), toy_llama()
    rows = model.get_input_embeddings().weight.detach()
    model.resize_token_embeddings(len(tokenizer) + SPARE, mean_resizing=False)
    model.get_input_embeddings().weight.data[len(tokenizer) :] = rows[: len(tokenizer)].mean(0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_parallel(folder: Path, target: Path) -> Path:
    """A random drafter whose embeddings are the target's."""
    tokenizer, facts = toy_tokenizer(), read_target(str(target))
    ids = kept_tokens(len(tokenizer))
    config = parallel_config(
        facts.config,
        layer_ids=LAYER_IDS,
        draft_vocab_size=len(ids),
        num_heads=2,
        head_dim=64,
        intermediate_size=64,
        markov_rank=16,
        block_size=3,
    )
    config.initializer_range = 0.15
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = ParallelNetwork(config)
        network.mask_embedding.data.normal_(std=0.3)
        network.feature_scale.data.copy_(2.0 ** torch.randint(-3, 3, (3 * 128,)))
    record = manifest(target, "parallel")
    record.target.vocab_size = facts.vocab_size
    tensors = {DRAFT_VOCAB_NAME: vocab_tensors(ids, facts.vocab_size)}
    return write_drafter(folder, network, record, tokenizer=tokenizer, tensors=tensors)


def request_for(target: str | Path, folders: list[Path]) -> dict:
    """What the gate asks its process for, with half of its questions."""
    return {
        "target": str(target),
        "target_options": {},
        "template_options": {},
        "prompts": [toy_tokenizer()(question).input_ids for question in QUESTIONS[:6]],
        "folders": [str(folder) for folder in folders],
        "settings": {"num_draft_tokens": 3},
    }


def observed_here(target: str, folders: list[Path], *, settings: dict, **_) -> list[Observation]:
    """`parity.observed_elsewhere` in this process, since the start of another alone takes seconds."""
    found = answer(request_for(target, folders) | {"settings": settings})
    return [Observation.of_json(content) for content in found]
