"""Drawn texts are judged by the target's own probabilities: its draws pass, others do not."""

import pytest
import torch

from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.loading import load_drafter, load_target
from tests.export_folders import toy_tokenizer, write_causal_lm, write_padded_target
from train.export.drawn_text import drawn_text
from train.export.observation import QUESTIONS

NUM_PROMPTS, NUM_TOKENS = 4, 40


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """(target, drafter, prompts)."""
    root = tmp_path_factory.mktemp("drawn")
    folder = write_padded_target(root / "target")
    target = load_target(folder, dtype=torch.float32)
    drafter = load_drafter(write_causal_lm(root / "drafter", folder), target)
    return target, drafter, [toy_tokenizer()(text).input_ids for text in QUESTIONS[:NUM_PROMPTS]]


def drawn(given, temperature: float) -> list[list[int]]:
    target, drafter, prompts = given
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=3)
    return decoder.generate(
        prompts, max_new_tokens=NUM_TOKENS, temperature=temperature, seed=1
    ).token_ids


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_texts_drawn_behind_a_drafter_are_the_targets(given, temperature):
    target, _, prompts = given
    found = drawn_text(target, prompts, drawn(given, temperature), temperature)
    assert found.is_the_targets
    assert found.mean == pytest.approx(found.expected, abs=0.5)


@pytest.mark.parametrize(
    ("drawn_at", "sign"),
    [(0.0, 1), (0.4, 1), (3.0, -1)],  # too likely, a little too likely, too rare
)
def test_texts_drawn_at_another_temperature_are_not(given, drawn_at, sign):
    target, _, prompts = given
    found = drawn_text(target, prompts, drawn(given, drawn_at), 1.0)
    assert not found.is_the_targets
    assert found.score * sign > 0


def test_a_token_that_the_target_cannot_draw_is_no_draw_of_it(given):
    target, _, prompts = given
    texts = drawn(given, 1.0)
    texts[0][3] = target.real_vocab_size  # a row of the head's padding
    assert drawn_text(target, prompts, texts, 1.0).score == -torch.inf


def test_no_text_is_no_proof(given):
    target, _, prompts = given
    with pytest.raises(ValueError, match="no drawn tokens to judge"):
        drawn_text(target, prompts, [[] for _ in prompts], 1.0)
