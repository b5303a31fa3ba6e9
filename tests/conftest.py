"""Tiny random models, made in memory: no test needs a network.

Torch is imported where it is used: with `-n 2` this file is also read by the process that hands the
tests out, and the others start only then.
"""

from __future__ import annotations

import gc
import os
import random
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdec_runtime.model import CausalModel

VOCAB_SIZE = 64


# With `-n 2`: what takes long to set up comes first, so that nothing long is left for the end, and
# what shares a set-up stays together.
FIRST = (
    "test_train_cli",
    "test_checkpoint",  # these three share a server of processes
    "test_loop",
    "test_processes",
    "test_compiled",
    "test_eval_cli",
    "test_recurrent",
    "test_greedy_decode",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files in front, the others in their order."""
    place = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(FIRST)))


def pytest_collection_finish() -> None:
    """What the imports have left stays to the end, and what tests leave is looked for less often:
    searching for garbage took a twelfth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests run side by side, and waiting threads would spin on each other's cores."""
    import torch

    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    same_random_numbers()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    same_random_numbers()


def same_random_numbers() -> None:
    """Every fixture and every test draws the same, whatever ran before it in its process: which
    tests those are depends on how fast the processes are.

    As `train.rng.seed_everything`, without what `torch.manual_seed` keeps for a GPU that is not in
    use: the text of the whole call stack, which took milliseconds a test.
    """
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each process takes a half of the tests in a row, and from the other's when it is done."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.option.dist == "load" else None


def tiny_llama(seed: int, *, num_layers: int = 2, vocab_size: int = VOCAB_SIZE) -> PreTrainedModel:
    """A random Llama decoder, float32, eval mode; equal seeds give equal weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,  # large enough that greedy text is not one repeated token
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def tiny_model(seed: int, **settings: Any) -> CausalModel:
    """`tiny_llama` in the engine that is fastest here, for tests of what is no matter of engines: a
    pass through the code of transformers takes several times as long."""
    from specdec_runtime.engines import make_model

    return make_model(tiny_llama(seed, **settings))


def plain_greedy(
    module: PreTrainedModel, prompts: list[list[int]], num_tokens: int, **arguments: Any
) -> list[list[int]]:
    """New tokens of transformers' own greedy decoding, which pads on the left."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = {"do_sample": False, "max_new_tokens": num_tokens, "pad_token_id": 0}
    output = module.generate(ids, attention_mask=mask, **settings, **arguments)
    return output[:, width:].tolist()


@pytest.fixture(scope="session")
def tiny_target() -> PreTrainedModel:
    return tiny_llama(0, num_layers=2)


@pytest.fixture(scope="session")
def tiny_draft() -> PreTrainedModel:
    return tiny_llama(1, num_layers=1)
