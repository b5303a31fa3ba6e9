"""Speed: ratios of what was timed, without clipping; fair to both sides; within its time limit."""

from dataclasses import replace

import numpy as np
import pytest

from eval.acceptance import measure_acceptance
from eval.budget import LEAST_PROMPTS, Amounts, PassTime, describe, estimate, fit_prompts, total
from eval.config import EvaluationConfig
from eval.costs import measure_costs, rising, run_lengths, trimmed_mean, verify_costs
from eval.parts import Parts
from eval.progress import silent_stage
from eval.reference import Reference, find_baseline, own_decoder, plain_decoders
from eval.speed import (
    Plan,
    Timing,
    fit_to_time,
    speculative_decode,
    speed_result,
    spread,
    time_interleaved,
    time_prompt,
    whole,
)
from eval.suites import EvalPrompt
from eval.timing import SuiteTiming, TimedSuite, remarks, time_suites
from specdec_runtime.auto_length import time_passes
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.prompt_lookup import PromptLookupDrafter
from specdec_runtime.hf_model import HFModel
from specdec_runtime.stats import AcceptanceStats
from specdec_runtime.target import as_target
from tests.conftest import tiny_llama, tiny_model

PROMPTS = [[1, *range(5 + i, 12 + 2 * i)] for i in range(3)]


@pytest.fixture(scope="module")
def target():
    return as_target(tiny_model(0))


def timings(seconds: list[list[float]], tokens: int = 10) -> list[list[Timing]]:
    """[repeat][prompt] timings of made-up clocks; a tenth of each is prefill."""
    return [
        [Timing(s, 0.1 * s, 0.1 * s, [5] * tokens, AcceptanceStats(num_rounds=5)) for s in repeat]
        for repeat in seconds
    ]


def compare(plain, fast):
    return speed_result(plain, fast, drafter="d", suite="s", num_draft_tokens=3, num_resamples=100)


def test_speedup_is_the_ratio_of_summed_medians():
    plain = timings([[1.0, 3.0], [1.0, 3.0], [9.0, 3.0]])  # one disturbed repeat
    fast = timings([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    result = compare(plain, fast)
    assert result.speedup.value == pytest.approx(4.0 / 2.0)
    assert result.mean_prompt_speedup == pytest.approx((1.0 + 3.0) / 2)
    assert result.speedup.low <= result.speedup.value <= result.speedup.high


def test_useless_drafter_is_reported_below_one():
    result = compare(timings([[1.0, 1.0]]), timings([[1.6, 1.5]]))
    assert result.speedup.value == pytest.approx(2.0 / 3.1)
    assert result.speedup.high < 1.0


def test_different_token_counts_are_compared_per_token():
    result = compare(timings([[2.0, 2.0]], tokens=20), timings([[1.0, 1.0]], tokens=10))
    assert result.speedup.value == pytest.approx(1.0)


def test_spread_is_relative_to_the_median_repeat():
    assert spread(timings([[1.0], [1.2], [1.1]])) == pytest.approx(0.2 / 1.1)


def test_spread_of_a_single_repeat_compares_its_halves():
    assert spread(timings([[1.0, 1.0, 1.2, 1.2]])) == pytest.approx(0.2 / 1.1)
    assert spread(timings([[1.0]])) == 0.0


def test_time_limit_shrinks_repeats_to_two_and_prompts_then():
    assert fit_to_time(1.0, num_prompts=9, num_repeats=3, limit_s=100) == Plan(9, 3)
    assert fit_to_time(1.0, num_prompts=9, num_repeats=3, limit_s=20) == Plan(9, 2)
    assert fit_to_time(1.0, num_prompts=9, num_repeats=3, limit_s=15) == Plan(7, 2)
    assert fit_to_time(1.0, num_prompts=9, num_repeats=3, limit_s=11) == Plan(9, 1)
    assert fit_to_time(1.0, num_prompts=9, num_repeats=3, limit_s=5) == Plan(5, 1)
    assert fit_to_time(9.0, num_prompts=9, num_repeats=3, limit_s=1) == Plan(2, 1)
    assert fit_to_time(1.0, num_prompts=9, num_repeats=1, limit_s=10) == Plan(9, 1)


def paced(name: str, chunk: int, calls: list[tuple[str, int]], *, length: int = 4):
    """A decoder that writes `chunk` tokens a step."""

    def decode(prompt, max_new_tokens):
        for tokens in range(chunk, length + 1, chunk):
            calls.append((name, tokens))
            yield tokens
        return Timing(1.0, 0.1, 0.1, [1])

    return decode


def test_who_has_written_the_fewest_tokens_goes_next():
    calls: list[tuple[str, int]] = []
    found = time_prompt(
        {"plain": paced("plain", 1, calls), "fast": paced("fast", 2, calls)},
        PROMPTS[0],
        max_new_tokens=4,
        turn=1,
    )
    assert calls == [
        *(("fast", 2), ("plain", 1), ("plain", 2), ("fast", 4), ("plain", 3), ("plain", 4)),
    ]
    assert set(found) == {"plain", "fast"}


def test_every_decoder_decodes_every_prompt_in_every_repeat_in_rotating_order():
    calls: list[tuple[str, int]] = []
    decoders = {name: paced(name, 1, calls, length=1) for name in "ab"}
    found = time_interleaved(decoders, PROMPTS, max_new_tokens=4, num_repeats=2)
    assert [len(repeat) for repeat in found["a"]] == [3, 3]
    names = [name for name, _ in calls]
    warm_up, timed = names[:2], names[2:]
    assert warm_up == ["a", "b"]
    assert timed == ["a", "b", "b", "a", "a", "b", "b", "a", "a", "b", "b", "a"]


class Clock:
    """A made-up perf_counter that passes advance; the machine gets slower on the way, or is
    disturbed: a pass takes a random time longer, one in fifty as long as ten."""

    def __init__(self, slowdown: float = 0.05, *, disturbed: bool = False) -> None:
        self.now = self.busy = 0.0
        self.slowdown, self.disturbed = slowdown, disturbed
        self.noise = np.random.default_rng(4)

    def __call__(self) -> float:
        return self.now

    def run(self, seconds: float) -> None:
        self.busy += seconds
        if self.disturbed:
            seconds *= 1.0 + self.noise.exponential(0.2) + 9.0 * (self.noise.random() < 0.02)
        self.now += seconds * (1.0 + self.slowdown * self.busy)


def on_clock(monkeypatch, clock, model, pass_s, *, another_token=0.0):
    """Has passes of a model take `pass_s` by the clock, and that share more for each further token."""
    monkeypatch.setattr("specdec_runtime.decode.time.perf_counter", clock)
    forward = model.forward

    def timed(token_ids, cache, **options):
        clock.run(pass_s * (1.0 + another_token * (token_ids.shape[1] - 1)))
        return forward(token_ids, cache, **options)

    monkeypatch.setattr(model, "forward", timed)


def test_a_machine_that_gets_slower_does_not_decide_a_speedup(target, monkeypatch):
    """Two plain decoders on a clock that ends at twice its first speed, or worse."""
    on_clock(monkeypatch, Clock(), target.model, 0.02)
    plain = speculative_decode(target, None, 0)
    found = time_interleaved(
        {"a": plain, "b": plain}, PROMPTS[:1], max_new_tokens=32, num_repeats=1
    )
    assert compare(found["a"], found["b"]).speedup.value == pytest.approx(1.0, abs=0.01)
    # The control: one behind the other, as whole decodes.
    first, second = (whole(plain(PROMPTS[0], 32)) for _ in range(2))
    assert compare([[first]], [[second]]).speedup.value < 0.98


def test_target_against_itself_undrafted_is_about_one(target, monkeypatch):
    on_clock(monkeypatch, Clock(0.0, disturbed=True), target.model, 0.02)
    plain = speculative_decode(target, None, 0)
    found = time_interleaved({"a": plain, "b": plain}, PROMPTS, max_new_tokens=12, num_repeats=5)
    result = compare(found["a"], found["b"])
    assert result.speedup.value == pytest.approx(1.0, abs=0.35)
    assert result.acceptance_length == pytest.approx(1.0)


def test_timed_texts_are_the_plain_texts(target, tmp_path):
    drafters = {"useless": CausalLMDrafter(tiny_model(1)), "lookup": PromptLookupDrafter()}
    prompts = [EvalPrompt(str(i), ids) for i, ids in enumerate(PROMPTS)]
    lengths = {"useless": [2, 1, "auto"], "lookup": [3]}

    def timed():
        return time_suites(
            target,
            drafters,
            {"s": TimedSuite(prompts=prompts, lengths=lengths), "t": TimedSuite(prompts=prompts[:2], lengths=lengths)},
            config=EvaluationConfig(max_new_tokens=8, speed_repeats=2, num_resamples=100),
            plain=speculative_decode(target, None, 0),
            limit_s=1e6,
            parts=Parts(tmp_path, "this evaluation"),
            stage=silent_stage,
        )  # fmt: skip

    timing = timed()
    found = [(s.drafter, s.num_draft_tokens, s.is_auto) for s in timing["s"].speeds]
    assert found == [
        *(("useless", 2, False), ("useless", 1, False), ("useless", 8, True)),
        ("lookup", 3, False),
    ]
    assert [(s.num_prompts, s.num_repeats) for s in timing["t"].speeds] == [(2, 2)] * 4
    [times] = timing["t"].speeds[0].prompts[1:]
    assert (times.prompt_id, len(times.plain_s), len(times.speculative_s)) == ("1", 2, 2)
    plain = measure_acceptance(target, None, PROMPTS, num_draft_tokens=0, max_new_tokens=8)
    assert all(texts.token_ids == plain.token_ids for texts in timing["s"].texts)
    # What is kept is read again: an interrupted evaluation continues with the prompts that are left.
    assert timed()["s"].speeds == timing["s"].speeds


def test_remarks_are_made_once_for_all_suites():
    once = compare(timings([[1.0, 1.0]]), timings([[0.8, 0.8]]))
    wanted = {
        name: TimedSuite(prompts=[EvalPrompt("", [1])] * number, lengths={"d": [3]})
        for name, number in {"a": 2, "b": 9, "c": 9}.items()
    }
    found = remarks(
        {name: SuiteTiming(speeds=[once], texts=[], noise=noise) for name, noise in zip("abc", (0.0, 0.2, 0.3), strict=True)},
        wanted,
    )  # fmt: skip
    assert [flag.code for flag in found] == ["fewer_timed_prompts", "one_repeat", "noisy_machine"]
    assert found[0].message.startswith("2 prompts of b, c were timed")
    assert "30% (b, c)" in found[2].message
    twice = replace(once, num_repeats=2)
    assert remarks({"a": SuiteTiming(speeds=[twice], texts=[], noise=0.0)}, wanted) == []


def test_costs_are_those_of_the_passes_and_plain_decoding_costs_one(target, monkeypatch):
    clock = Clock(0.0)
    on_clock(monkeypatch, clock, target.model, 0.02, another_token=0.1)
    small = HFModel(tiny_llama(1, num_layers=1))
    on_clock(monkeypatch, clock, small, 0.005)
    passes = time_passes(target.model, PROMPTS[0], max_draft_tokens=3)
    assert passes == pytest.approx([0.02, 0.022, 0.024, 0.026])
    drafters = {"d": CausalLMDrafter(small), "lookup": PromptLookupDrafter()}
    first, second = measure_costs(target, drafters, PROMPTS[:1], max_draft_tokens=3, pass_s=passes)
    assert [first.drafter, second.drafter] == list(drafters)
    assert first.costs.verify[0] == 1.0
    assert first.costs.max_draft_tokens == 3
    assert first.costs.draft_cost == pytest.approx(0.25)
    assert second.costs.draft_cost == 0.0
    assert first.costs.overhead >= first.draft_start_s / first.costs.target_s
    # One target, one pass of it: what differs between drafters is their own part alone.
    shared = ("target_s", "verify", "plain_overhead")
    assert all(getattr(first.costs, one) == getattr(second.costs, one) for one in shared)


def test_costs_of_a_faster_baseline_are_stated_against_that_one(target):
    passes = time_passes(target.model, PROMPTS[0], max_draft_tokens=1)
    [result] = measure_costs(
        target,
        {"d": PromptLookupDrafter()},
        PROMPTS[:1],
        max_draft_tokens=1,
        pass_s=passes,
        plain_token_s=1e-9,
    )
    assert result.costs.plain_overhead == pytest.approx(-1.0, abs=1e-3)


def test_short_and_doubling_draft_lengths_are_run():
    assert run_lengths(6) == [1, 2, 3, 4, 6]
    assert run_lengths(1) == [1]


def test_costs_do_not_see_that_the_machine_gets_slower(target, monkeypatch):
    clock = Clock()
    on_clock(monkeypatch, clock, target.model, 0.02, another_token=0.1)
    bare = [1.0 + 0.1 * k for k in range(5)]
    copy = CausalLMDrafter(tiny_model(0))
    [result] = measure_costs(target, {"d": copy}, PROMPTS, max_draft_tokens=4, pass_s=bare)
    assert clock.now > 1.1 * clock.busy  # it did
    assert result.costs.verify == pytest.approx(bare, abs=0.01)


def test_draft_lengths_that_were_not_decoded_lie_between_those_that_were():
    seen = {0: [1.0] * 9, 2: [1.3] * 9, 4: [1.5] * 9, 3: [9.0]}
    bare = [1.0, 1.1, 1.2, 1.3, 1.4]
    costs = verify_costs(seen, bare)
    assert costs[0] == 1.0
    assert (costs[2], costs[4]) == pytest.approx((1.3, 1.5))
    assert costs[1] == pytest.approx(1.1 * (1.0 + 1.3 / 1.2) / 2)
    assert costs[3] == pytest.approx(1.3 * (1.3 / 1.2 + 1.5 / 1.4) / 2)


def test_a_mean_of_costs_sees_both_kinds_of_rounds_and_no_outlier():
    assert trimmed_mean([0.1] * 4 + [0.5] * 5 + [90.0]) == pytest.approx((3 * 0.1 + 5 * 0.5) / 8)
    assert trimmed_mean([0.1, 90.0, 0.2, 0.3]) == pytest.approx(0.25)
    assert trimmed_mean([0.1]) == 0.1


def test_fastest_plain_decoder_is_the_baseline():
    target = as_target(tiny_llama(0))
    reference = Reference(target)
    assert set(plain_decoders(target, reference)) == {
        own_decoder(target),
        "transformers generate, float32",
    }
    found = find_baseline(target, reference, PROMPTS[:1], max_new_tokens=6)
    used = [candidate for candidate in found if candidate.used]
    assert len(used) == 1
    assert used[0].tokens_per_s == max(candidate.tokens_per_s for candidate in found)


def test_fewer_prompts_are_decoded_where_a_pass_is_slow():
    config = EvaluationConfig(time_limit_s=100.0)
    amounts = Amounts(
        num_suites=2, num_prompts=24, prompt_tokens=80.0, num_drafters=2, num_recorded=2, num_followed=0,
        num_temperatures=2,
    )  # fmt: skip
    fast, slow = PassTime(0.001, 0.0), PassTime(0.2, 0.0)
    assert fit_prompts(fast, amounts, config) == amounts
    fewer = fit_prompts(slow, amounts, config)
    assert fewer.num_prompts == LEAST_PROMPTS
    parts = estimate(slow, fewer, config)
    assert "the target's texts" in describe(parts)
    assert total(parts) == pytest.approx(sum(part.seconds for part in parts))


def test_drafters_that_are_replayed_leave_time_for_more_prompts():
    amounts = Amounts(
        num_suites=2, num_prompts=24, prompt_tokens=80.0, num_drafters=3, num_recorded=3, num_followed=0,
        num_temperatures=2,
    )  # fmt: skip
    decoded = replace(amounts, num_recorded=0)
    passes, config = PassTime(0.02, 0.0015), EvaluationConfig()
    replayed_prompts = fit_prompts(passes, amounts, config).num_prompts
    assert fit_prompts(passes, decoded, config).num_prompts < replayed_prompts
    followed = replace(amounts, num_followed=2)
    assert total(estimate(passes, followed, config)) > total(estimate(passes, amounts, config))


def test_what_is_asked_for_besides_is_in_the_estimate():
    amounts = Amounts(
        num_suites=2, num_prompts=12, prompt_tokens=80.0, num_drafters=2, num_recorded=2, num_followed=1,
        num_temperatures=2,
    )  # fmt: skip
    a_pass, plain = PassTime(0.02, 0.001), EvaluationConfig()
    asked = EvaluationConfig(
        policies=True, rival_prompts=2, batch_sizes=[1, 4], context_lengths=[128, 1024]
    )
    parts = {part.name: part.seconds for part in estimate(a_pass, amounts, asked)}
    assert set(parts) - {part.name for part in estimate(a_pass, amounts, plain)} == {
        *("policies", "other programs", "batch sizes", "context lengths"),
    }
    longer = replace(asked, context_lengths=[128, 4096])
    grown = {part.name: part.seconds for part in estimate(a_pass, amounts, longer)}
    assert grown["context lengths"] > parts["context lengths"]
    assert fit_prompts(a_pass, amounts, asked).num_prompts < amounts.num_prompts


def test_a_disturbed_pass_is_no_reason_for_longer_drafts():
    assert rising([1.3, 1.5, 1.1, 1.4, 2.0], [1] * 5) == pytest.approx([1.3, 1.3, 1.3, 1.4, 2.0])
    assert rising([1.2, 1.0], [3, 1]) == pytest.approx([1.15, 1.15])
    assert rising([1.0, 1.1, 1.3], [1, 1, 1]) == [1.0, 1.1, 1.3]
