"""Exported folders in the engines themselves: load, the target's text, our acceptance.

Run by `make serving-test`; skipped where the environments are not there (`make serving-env`).
"""

from pathlib import Path

import pytest
import torch

from eval.acceptance import length_interval, measure_acceptance
from specdec_runtime.loading import load_drafter, load_target
from tests.export_folders import write_causal_lm, write_eagle3, write_target
from tests.serving.side_by_side import (
    NEAR_TIE,
    call_driver,
    first_differences,
    python_of,
    serve,
    target_gguf,
)
from train.export.observation import QUESTIONS, fixed_prompts
from train.export.source import read_source

pytestmark = pytest.mark.serving

NUM_PROMPTS, MAX_NEW_TOKENS, NUM_DRAFT_TOKENS = 6, 24, 3
TEXTS = (*QUESTIONS, "1. one\n\n2. two  3", "def f(x):\n    return x**2\n", "na\u00efve \u4f60")
WRITERS = {"causal_lm": write_causal_lm, "eagle3": write_eagle3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("serving") / "target")


@pytest.mark.parametrize(
    ("engine", "kind"), [("llamacpp", "causal_lm"), ("vllm", "causal_lm"), ("vllm", "eagle3")]
)
def test_an_engine_gives_the_targets_text_and_our_acceptance(folder, tmp_path, engine, kind):
    _need(engine)
    source = read_source(
        WRITERS[kind](tmp_path / "drafter", folder), target=None, num_draft_tokens=NUM_DRAFT_TOKENS
    )
    target = load_target(folder, dtype=torch.float32)
    prompts = fixed_prompts(target, {})[:NUM_PROMPTS]
    settings = {"num_draft_tokens": NUM_DRAFT_TOKENS, "max_new_tokens": MAX_NEW_TOKENS}
    plain = measure_acceptance(target, None, prompts, **settings).token_ids
    drafter = load_drafter(source.files.folder, target)
    ours = measure_acceptance(target, drafter, prompts, **settings)
    served = serve(engine, source, prompts, tmp_path, max_new_tokens=MAX_NEW_TOKENS)
    different = first_differences(target, prompts, plain, served.token_ids)
    assert all(gap < NEAR_TIE for _, _, gap in different), different
    interval = length_interval(ours.prompts)
    assert interval.low - 0.1 <= served.acceptance_length <= interval.high + 0.1


def test_llama_cpp_reads_text_as_the_targets_tokenizer(folder, tmp_path):
    _need("llamacpp")
    drafter = write_causal_lm(tmp_path / "drafter", folder)
    source = read_source(drafter, target=None, num_draft_tokens=NUM_DRAFT_TOKENS)
    request = {
        "target": str(target_gguf(source, tmp_path)),
        "drafter": None,
        "context": 256,
        "threads": 1,
        "tokenize": TEXTS,
    }
    tokenizer = source.target.tokenizer
    expected = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    assert call_driver("llamacpp", request) == expected


def _need(engine: str) -> None:
    if python_of(engine) is None:
        pytest.skip(f"{engine} is not installed: make serving-env")
