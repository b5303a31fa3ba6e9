"""Draft lengths under the names of the servers."""

import json
import re
from dataclasses import replace

import pytest

from eval.results import (
    DrafterFacts,
    PolicyResult,
    Prediction,
    Results,
    SuiteFacts,
    SweepPoint,
    TargetFacts,
)
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


@pytest.mark.parametrize("kind", ["causal_lm", "eagle3", "parallel", "prompt_lookup"])
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


def test_a_threshold_is_given_where_it_is_the_fastest_policy():
    results = _results("causal_lm", 3)
    results.suites = [SuiteFacts(name="s", num_prompts=2, num_too_long=0, mean_prompt_tokens=1.0,
                                 categories={})]  # fmt: skip
    fixed = PolicyResult(
        drafter="mine", suite="s", policy="fixed, 3", num_rounds=9, num_accepted=9,
        mean_drafted=3.0, acceptance_length=2.0, speedup=1.4,
    )  # fmt: skip
    sure = replace(fixed, policy="confidence", speedup=1.5, threshold=0.4, max_draft_tokens=8)
    results.policies = [fixed, sure]
    texts = {one.server: one.text for one in serving_settings(results)}
    assert texts["llama.cpp, by confidence"] == "--draft-max 8 --draft-p-min 0.4"
    head = replace(results, drafters=[replace(results.drafters[0], kind="eagle3")])
    sure_of = [one.server for one in serving_settings(head) if "confidence" in one.server]
    assert sure_of == ["Draftloop, by confidence"]  # the others cannot run such a head
    results.policies = [replace(fixed, speedup=1.6), sure]
    assert not any("confidence" in one.server for one in serving_settings(results))


def test_draft_lengths_by_batch_size_are_the_fastest_measured_and_off_where_none_gains():
    results = _results("causal_lm", 3)
    results.sweeps = [
        SweepPoint(
            drafter="mine", batch_size=size, context_tokens=9, num_draft_tokens=length,
            plain_tokens_per_s=1.0, tokens_per_s=speedup, speedup=speedup, measured=True,
        )
        for size, length, speedup in ((1, 2, 1.2), (1, 3, 1.4), (4, 2, 1.1), (16, 2, 0.8))
    ]  # fmt: skip
    texts = {one.server: one.text for one in serving_settings(results)}
    assert texts["draft length by batch size"] == "1: 3, 4: 2, 16: off"
