"""The certificate passes what is the target's text and fails what is not."""

import pytest
import torch

from eval.acceptance import measure_acceptance
from eval.conclusions import withheld
from eval.exactness import (
    Texts,
    arithmetic_of,
    certify,
    compare,
    first_difference,
    implementation_noise,
    reference_choices,
    reference_texts,
    self_draft_acceptance,
    shape_noise,
    tie_tolerance,
    top_two_gap,
)
from eval.reference import Reference, reference_checks
from eval.results import IdentityCheck
from eval.suites import EvalPrompt
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.hf_model import HFModel
from specdec_runtime.target import Target, as_target
from tests.conftest import tiny_llama
from tests.test_report import speed

MAX_NEW_TOKENS = 16
PROMPTS = [EvalPrompt(f"p{i}", [1, *range(5 + i, 12 + 2 * i)]) for i in range(4)]
IDS = [prompt.token_ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def target() -> Target:
    return as_target(tiny_llama(0))


@pytest.fixture(scope="module")
def plain(target) -> list[list[int]]:
    return measure_acceptance(
        target, None, IDS, num_draft_tokens=0, max_new_tokens=MAX_NEW_TOKENS
    ).token_ids


def check(target, plain, found, tolerance=0.0) -> IdentityCheck:
    return compare(target, PROMPTS, Texts("check", plain, found), tolerance=tolerance)


@pytest.mark.parametrize("seed", [0, 1])  # a perfect and a useless drafter
def test_speculative_texts_of_any_drafter_pass(seed, target, plain):
    drafter = CausalLMDrafter(HFModel(tiny_llama(seed)))
    found = measure_acceptance(
        target, drafter, IDS, num_draft_tokens=3, max_new_tokens=MAX_NEW_TOKENS
    ).token_ids
    result = check(target, plain, found)
    assert result.num_identical == len(PROMPTS)
    assert certify("draft", target, [result], engine="eager").passed


def test_plain_texts_equal_transformers_generate(target, plain):
    module = tiny_llama(0)
    expected = reference_texts(
        module, IDS, max_new_tokens=MAX_NEW_TOKENS, eos_token_ids=target.eos_token_ids
    )
    assert check(target, expected, plain).passed
    chosen = [reference_choices(module, i, t) for i, t in zip(IDS, plain, strict=True)]
    assert check(target, chosen, plain).passed
    assert implementation_noise(target.model, module, [*IDS[0], *plain[0]]) < 1e-4


def test_transformers_checks_cover_all_texts_and_a_few_by_generate(target, plain):
    forward, generated = reference_checks(
        target,
        Reference(target),
        PROMPTS,
        plain,
        num_generated=2,
        limit_s=1e6,
        on_prompt=lambda count: None,
    )
    assert (forward.num_identical, forward.num_prompts) == (4, 4)
    assert (generated.num_identical, generated.num_prompts) == (2, 2)


def test_one_wrong_token_fails_and_is_located(target, plain):
    found = [list(text) for text in plain]
    found[2][5] = (found[2][5] + 1) % 60
    result = check(target, plain, found)
    assert result.num_identical == len(PROMPTS) - 1
    assert (result.divergences[0].prompt_id, result.divergences[0].position) == ("p2", 5)
    assert result.divergences[0].kind == "unexplained"
    certificate = certify("draft", target, [result], engine="eager")
    assert not certificate.passed
    assert "p2 at token 5" in certificate.summary


def test_a_shorter_text_is_a_difference_of_length(target, plain):
    found = [plain[0][:-1], *plain[1:]]
    result = check(target, plain, found)
    assert result.divergences[0].kind == "length"
    assert not result.passed


def test_a_flip_counts_as_near_tie_only_within_the_measured_tolerance(target, plain):
    found = [list(text) for text in plain]
    found[0][3] += 1
    gap = top_two_gap(target.model, [*IDS[0], *plain[0][:3]])
    assert check(target, plain, found, tolerance=1.01 * gap).passed
    assert not check(target, plain, found, tolerance=0.99 * gap).passed


def test_noise_that_is_no_rounding_excuses_nothing():
    assert tie_tolerance(1e-5, torch.float32) > 0
    assert tie_tolerance(5.0, torch.float32) == 0.0
    assert tie_tolerance(0.1, torch.bfloat16) > 0


def test_shape_of_a_pass_changes_float32_logits_by_rounding_only(target):
    assert shape_noise(target.model, [*IDS[0], *IDS[1]], width=4) < 1e-4


def test_target_drafting_for_itself_is_accepted(target):
    assert self_draft_acceptance(target, IDS[:2], max_new_tokens=8) >= 0.98


def test_low_self_acceptance_fails_the_certificate(target, plain):
    same = check(target, plain, plain)
    certificate = certify("d", target, [same], engine="eager", self_draft_acceptance=0.9)
    assert not certificate.passed
    assert "98%" in certificate.summary


def test_nothing_compared_is_no_certificate(target):
    assert not certify("d", target, [], engine="eager").passed


def test_first_difference_of_texts():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_arithmetic_is_named_by_what_computes(target):
    assert arithmetic_of(target.model) == "float32"


def test_withheld_speeds_hold_no_speedup():
    hidden = withheld(speed("d", "s", 3, 1.4))
    assert hidden.speedup is None
    assert hidden.decode_speedup is None
    assert hidden.repeat_speedups == []
