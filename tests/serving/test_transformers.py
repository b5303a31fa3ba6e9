"""Assisted generation of transformers with an exported folder: the target's text, our acceptance."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from eval.acceptance import length_interval, measure_acceptance
from specdec_runtime.loading import load_drafter, load_target
from tests.export_folders import write_causal_lm, write_target
from train.export.drivers.drive_transformers import decode
from train.export.exporting import export
from train.export.observation import fixed_prompts

NUM_PROMPTS, MAX_NEW_TOKENS, NUM_DRAFT_TOKENS = 4, 16, 3
# transformers drafts in front of the prefill as well: one round more in each answer.
TOLERANCE = 0.1


def test_assisted_generation_gives_the_targets_text_and_our_acceptance(tmp_path):
    folder = write_target(tmp_path / "target")
    drafter = write_causal_lm(tmp_path / "drafter", folder)
    exported = export(drafter, tmp_path / "out", engine="transformers").folder
    target = load_target(folder)
    prompts = fixed_prompts(target, {})[:NUM_PROMPTS]
    settings = {"num_draft_tokens": NUM_DRAFT_TOKENS, "max_new_tokens": MAX_NEW_TOKENS}
    plain = measure_acceptance(target, None, prompts, **settings)
    ours = measure_acceptance(target, load_drafter(drafter, target), prompts, **settings)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assistant = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    rows = [decode(model, assistant, prompt, MAX_NEW_TOKENS) for prompt in prompts]
    assert [row["token_ids"] for row in rows] == plain.token_ids
    theirs = 1 + sum(row["num_accepted"] for row in rows) / sum(row["num_rounds"] for row in rows)
    interval = length_interval(ours.prompts)
    assert interval.low - TOLERANCE <= theirs <= interval.high + TOLERANCE
    assert theirs > 1.05  # it does accept: an equality of two ones would prove nothing
    assert ours.acceptance_length == pytest.approx(theirs, abs=3 * TOLERANCE)
