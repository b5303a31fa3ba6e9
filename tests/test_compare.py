"""Two evaluations compared: paired by prompt, and a failure only where it is sure and large."""

from dataclasses import replace

import pytest

from eval.compare import compare, main
from eval.intervals import Interval
from eval.records import write_json
from eval.results import PromptCounts, PromptTimes, Results
from tests.test_report import acceptance, sample_results, speed


def results_with(accepted: list[int], speedup: float = 1.3) -> Results:
    """One suite; prompt i keeps accepted[i] drafts in 50 rounds."""
    results = sample_results()
    prompts = [
        PromptCounts(
            prompt_id=f"p{i}",
            num_rounds=50,
            num_drafted=150,
            num_accepted=count,
            num_tokens=51 + count,
            drafted_by_position=[50, 50, 50],
            accepted_by_position=[count, 0, 0],
            finish_reason="length",
            looping=False,
            token_ids=[1],
        )
        for i, count in enumerate(accepted)
    ]
    record = acceptance("distilled", "held_out", 0.0, [0.5, 0.2, 0.1])
    results.acceptance = [replace(record, prompts=prompts)]
    times = [
        PromptTimes(
            prompt_id=f"p{i}",
            plain_s=[1.0 + 0.1 * i, 1.1 + 0.1 * i],
            speculative_s=[(1.0 + 0.1 * i) / speedup, (1.1 + 0.1 * i) / speedup],
            num_plain_tokens=50,
            num_tokens=50,
        )
        for i in range(len(accepted))
    ]
    results.speed = [replace(speed("distilled", "held_out", 3, speedup), prompts=times)]
    results.suites = results.suites[:1]
    return results


BASE = [5, 40, 12, 33, 25, 8, 19, 44]


def test_equal_evaluations_differ_by_nothing():
    found = {one.what.split(",")[0]: one for one in compare(results_with(BASE), results_with(BASE))}
    assert set(found) == {"acceptance length", "speedup"}
    assert found["acceptance length"].change == Interval(0.0, 0.0, 0.0)
    assert found["speedup"].change.value == 0.0
    assert not any(one.is_sure for one in found.values())
    assert not found["acceptance length"].is_worse(0.0)


def test_a_small_loss_on_every_prompt_is_seen_although_prompts_differ_much():
    worse = results_with([count - 2 for count in BASE])
    length = compare(results_with(BASE), worse)[0]
    assert length.change.value == pytest.approx(-2 / 50)
    assert length.change.high < 0
    assert length.is_worse(0.02)
    assert not length.is_worse(0.05)


def test_noise_in_both_directions_is_no_loss():
    noisy = results_with([c + (6 if i % 2 else -8) for i, c in enumerate(BASE)])
    assert not compare(results_with(BASE), noisy)[0].is_worse(0.0)


def test_only_shared_prompts_are_compared():
    fewer = results_with(BASE[:3])
    found = compare(results_with(BASE), fewer)
    assert [one.num_prompts for one in found] == [3, 3]
    of_three = compare(fewer, fewer)
    assert [one.first for one in found] == pytest.approx([one.first for one in of_three])


def test_a_loss_of_speed_on_every_prompt_is_seen_although_prompts_differ_much():
    slower = compare(results_with(BASE), results_with(BASE, speedup=1.2))[1]
    assert slower.what == "speedup, 3 drafted"
    assert slower.change.value == pytest.approx(-0.1)
    assert slower.is_worse(0.02)


def test_speeds_without_times_by_prompt_are_not_compared():
    old = results_with(BASE)
    old.speed = [replace(old.speed[0], prompts=[])]
    assert [one.what.split(",")[0] for one in compare(old, old)] == ["acceptance length"]


def test_command_fails_for_ci_where_the_second_is_worse(tmp_path, capsys):
    write_json(tmp_path / "a" / "results.json", results_with(BASE))
    write_json(tmp_path / "b" / "results.json", results_with([c - 4 for c in BASE], speedup=1.0))
    a, b = str(tmp_path / "a"), str(tmp_path / "b" / "results.json")
    assert main([a, b]) == 1
    printed = capsys.readouterr().out
    assert printed.count("WORSE") == 2
    assert main([b, a]) == 0
    assert main([a, b, "--margin", "0.5"]) == 0
    capsys.readouterr()
    assert main([a, a, b]) == 1  # any of several
    assert f"{a}:" in capsys.readouterr().out
    assert main([b, a, a]) == 0


def test_other_targets_and_other_files_are_refused(tmp_path, capsys):
    other = results_with(BASE)
    other.target = replace(other.target, fingerprint="other")
    with pytest.raises(ValueError, match="different targets"):
        compare(results_with(BASE), other)
    write_json(tmp_path / "results.json", {"complete": True})
    assert main([str(tmp_path), str(tmp_path)]) == 2
    assert "is not a results file" in capsys.readouterr().err
    assert main([str(tmp_path / "no"), str(tmp_path)]) == 2
