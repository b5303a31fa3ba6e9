"""What an engine's acceptance has to be along its own drawn text: our runtime stands in for the engine."""

import pytest
import torch

from eval.acceptance import length_interval, measure_acceptance
from eval.target_texts import Answer
from specdec_runtime.loading import load_drafter, load_target
from tests.export_folders import toy_tokenizer, write_causal_lm, write_eagle3, write_padded_target
from train.export.along_text import expected_along, likeliest_drafts
from train.export.observation import QUESTIONS

NUM_PROMPTS, LENGTH, K = 4, 24, 3


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("along")
    folder = write_padded_target(root / "target")
    write_causal_lm(root / "causal_lm", folder)
    write_eagle3(root / "eagle3", folder)
    return root


@pytest.fixture(scope="module")
def target(root):
    return load_target(root / "target", dtype=torch.float32)


def decoded(target, drafter, *, temperature=1.0, num_draft_tokens=K, length=LENGTH):
    """(counts, answers) of our runtime at a temperature."""
    prompts = [toy_tokenizer()(text).input_ids for text in QUESTIONS[:NUM_PROMPTS]]
    found = measure_acceptance(
        target, drafter, prompts, num_draft_tokens=num_draft_tokens, max_new_tokens=length,
        temperature=temperature, seed=3,
    )  # fmt: skip
    texts = zip(prompts, found.token_ids, strict=True)
    return found.prompts, [Answer(prompt, text, length) for prompt, text in texts]


@pytest.mark.parametrize("kind", ["causal_lm", "eagle3"])
def test_likeliest_drafts_leave_nothing_to_chance(root, target, kind):
    drafter = load_drafter(root / kind, target, temperature=0.0)
    rows, answers = decoded(target, drafter)
    given = {"temperature": 1.0, "num_draft_tokens": K}
    found = expected_along(target, drafter, answers, **given)
    assert found.chance == 0
    assert [row.num_accepted for row in found.rows] == [row.num_accepted for row in rows]
    assert [row.num_rounds for row in found.rows] == [row.num_rounds for row in rows]
    assert sum(row.num_accepted for row in rows) > 0
    _, others = decoded(target, None, num_draft_tokens=0)  # another text has other counts
    changed = expected_along(target, drafter, others, **given)
    assert [row.num_accepted for row in changed.rows] != [row.num_accepted for row in rows]


def test_drawn_drafts_are_kept_as_often_as_expected(root, target):
    """One draft a round: there verification by blocks, which ours does, is that by tokens."""
    drafter = load_drafter(root / "causal_lm", target)
    rows, answers = decoded(target, drafter, num_draft_tokens=1)
    given = {"temperature": 1.0, "num_draft_tokens": 1}
    found = expected_along(target, drafter, answers, **given)
    expected = sum(row.num_accepted for row in found.rows)
    assert found.chance > 1
    assert sum(row.num_accepted for row in rows) == pytest.approx(expected, abs=4 * found.chance)
    assert length_interval(found.rows).value > 1.05


@pytest.mark.parametrize(("drawn_at", "is_right"), [(1.0, True), (0.0, False)])
def test_a_text_has_the_likeliest_draft_as_often_as_the_target_draws_it(
    root, target, drawn_at, is_right
):
    drafter = load_drafter(root / "causal_lm", target, temperature=0.0)
    _, answers = decoded(target, drafter, temperature=drawn_at, length=80)
    found = likeliest_drafts(target, drafter, answers, temperature=1.0)
    assert found.is_the_targets == is_right
    assert 0 < found.expected < 1


def test_no_text_is_no_proof(root, target):
    drafter = load_drafter(root / "causal_lm", target, temperature=0.0)
    with pytest.raises(ValueError, match="no drawn tokens to judge"):
        likeliest_drafts(target, drafter, [Answer([1, 2], [3], LENGTH)], temperature=1.0)
