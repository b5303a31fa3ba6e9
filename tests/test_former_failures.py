"""Places where an earlier drafter failed are asked again."""

import pytest

from eval.acceptance import measure_acceptance
from eval.former_failures import asked_again, read_failures
from eval.inspection import score_answer, weak_prefixes
from eval.report import write_report
from eval.suites import EvalPrompt
from eval.target_texts import Answer, TargetStates
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.target import as_target
from tests.conftest import tiny_model
from tests.test_replay import half_right_draft
from tests.test_report import sample_results

PROMPTS = [EvalPrompt("a", [1, 5, 6, 7]), EvalPrompt("b", [1, 9, 8])]


@pytest.fixture(scope="module")
def target():
    return as_target(tiny_model(0))


@pytest.fixture(scope="module")
def failures(target, tmp_path_factory):
    """What an evaluation of a drafter that is wrong now and then leaves."""
    ids = [prompt.token_ids for prompt in PROMPTS]
    texts = measure_acceptance(target, None, ids, num_draft_tokens=0, max_new_tokens=16).token_ids
    answers = [Answer(p, text, 16) for p, text in zip(ids, texts, strict=True)]
    scores = [score_answer(TargetStates(target), half_right_draft(), answer) for answer in answers]
    weak = weak_prefixes(target, PROMPTS, answers, scores, drafter="d", suite="s")
    folder = tmp_path_factory.mktemp("run")
    write_report(folder / "eval", sample_results(), [], weak)
    return folder


@pytest.mark.parametrize("place", ["", "eval", "eval/failures.jsonl"])
def test_they_are_read_from_a_run_an_evaluation_or_the_file(failures, place):
    assert read_failures(failures / place)


def test_the_same_drafter_is_wrong_at_all_of_them_and_the_target_at_none(target, failures):
    prefixes = read_failures(failures)
    same, best = (
        asked_again(TargetStates(target), drafter, prefixes, name="d", num_resamples=100)
        for drafter in (half_right_draft(), CausalLMDrafter(tiny_model(0)))
    )
    assert (same.num_right, best.num_right) == (0, len(prefixes))
    assert (same.right.value, best.right.value) == (0.0, 1.0)


def test_what_is_no_list_of_failures_is_named(failures, tmp_path):
    with pytest.raises(ValueError, match="no folder with failures"):
        read_failures(tmp_path)
    broken = tmp_path / "failures.jsonl"
    broken.write_text((failures / "eval" / "failures.jsonl").read_text() + "{}\n")
    with pytest.raises(ValueError, match=r"failures\.jsonl:\d+: not a prefix"):
        read_failures(broken)
