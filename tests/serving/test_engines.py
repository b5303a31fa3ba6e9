"""Exported folders in the engines themselves: load, the target's text, our acceptance.

Run by `make serving-test`; skipped where the environments are not there (`make serving-env`).
"""

from pathlib import Path

import pytest

from tests.export_folders import (
    write_causal_lm,
    write_eagle3,
    write_padded_target,
    write_parallel,
    write_target,
)
from train.export.engine_parity import verify_engine
from train.export.engines import ENGINES, call_driver, python_of, target_gguf
from train.export.exporting import export
from train.export.observation import QUESTIONS
from train.export.source import read_target

pytestmark = pytest.mark.serving

TEXTS = (*QUESTIONS, "1. one\n\n2. two  3", "def f(x):\n    return x**2\n", "na\u00efve \u4f60")
WRITERS = {"causal_lm": write_causal_lm, "eagle3": write_eagle3, "parallel": write_parallel}
SMALL = {"num_prompts": 6, "max_new_tokens": 24, "temperatures": [0.0, 1.0]}
# In Triton's interpreter: fewer tokens, and none drawn, which had not ended after ten minutes.
SLOW = {"num_prompts": 3, "max_new_tokens": 12, "temperatures": [0.0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("serving") / "target")


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("llamacpp", "causal_lm"),
        ("vllm", "causal_lm"),
        ("vllm", "eagle3"),
        ("vllm", "parallel"),
        ("speculators", "eagle3"),
    ],
)
def test_an_engine_gives_the_targets_text_and_our_acceptance(folder, tmp_path, form, kind):
    _need(ENGINES[form])
    if kind == "parallel":  # its mask is a row of the head's padding
        folder = write_padded_target(tmp_path / "padded")
    done = export(WRITERS[kind](tmp_path / "drafter", folder), tmp_path / "out", engine=form)
    settings = SLOW if kind == "parallel" else SMALL
    found = verify_engine(done.source, done.folder, form, **settings)
    assert [one.temperature for one in found] == settings["temperatures"]


def test_llama_cpp_reads_text_as_the_targets_tokenizer(folder, tmp_path):
    _need("llamacpp")
    target = read_target(str(folder))
    request = {
        "target": str(target_gguf(target, tmp_path)),
        "drafter": None,
        "context": 256,
        "threads": 1,
        "tokenize": TEXTS,
    }
    expected = [target.tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    assert call_driver("llamacpp", request) == expected


def _need(engine: str) -> None:
    if python_of(engine) is None:
        pytest.skip(f"{engine} is not installed: make serving-env")
