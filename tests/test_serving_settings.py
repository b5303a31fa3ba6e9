"""Draft lengths under the names of the servers."""

import json
import re
from dataclasses import replace

import pytest

from eval.results import DrafterFacts, Prediction, Results, TargetFacts
from eval.serving import serving_settings, serving_table


def _results(kind: str, best: int) -> Results:
    target = TargetFacts(
        name="t",
        revision=None,
        fingerprint="f",
        engine="native",
        dtype="float32",
        num_layers=2,
        hidden_size=8,
        vocab_size=16,
    )
    prediction = Prediction(
        drafter="mine",
        suite="s",
        lengths=[],
        best_num_draft_tokens=best,
        best_speedup=1.5,
        mean_acceptance=0.6,
        decomposition=[],
        what_if=[],
        measured_num_draft_tokens=best,
        predicted_at_measured=1.5,
        deviation=0.0,
    )
    drafter = DrafterFacts(name="mine", kind=kind, folder="d", free=False)
    return Results(
        created="now",
        target=target,
        machine={},
        settings={},
        drafters=[drafter],
        predictions=[prediction],
    )


@pytest.mark.parametrize("kind", ["causal_lm", "eagle3", "prompt_lookup"])
def test_vllm_gets_valid_json_with_the_recommended_length(kind):
    texts = {one.server: one.text for one in serving_settings(_results(kind, 3))}
    config = re.search(r"'(\{.*\})'", texts["vLLM"])[1].replace("DIR", '"dir"')
    assert json.loads(config)["num_speculative_tokens"] == 3


def test_sglang_counts_the_pending_token_among_the_drafted():
    texts = {one.server: one.text for one in serving_settings(_results("causal_lm", 3))}
    assert "--speculative-num-steps 3 " in texts["SGLang"]
    assert texts["SGLang"].endswith("--speculative-num-draft-tokens 4")


def test_a_drafter_that_does_not_pay_is_not_recommended_to_any_server():
    (only,) = serving_settings(_results("causal_lm", 0))
    assert "does not pay" in only.text


def test_a_drafter_without_a_prediction_has_no_settings():
    results = replace(_results("causal_lm", 2), predictions=[])
    assert serving_table(results).rows == []
