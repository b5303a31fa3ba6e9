"""Costs measured by the runtime itself, and what drafting makes of them; on a clock of our own."""

import time

import pytest

from specdec_runtime import auto_length
from specdec_runtime.auto_length import fit_line, measured_policy, time_passes
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.draft_length import CostAware
from specdec_runtime.drafters.composite import CompositeDrafter
from specdec_runtime.drafters.suffix_lookup import SuffixLookupDrafter
from specdec_runtime.target import Target
from tests.table_model import ScriptedDrafter, TableModel

TEXT = [5, 6, 7, 8, 9] * 60


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


class TimedTable(TableModel):
    """Every pass takes 2 ms, and `token_s` more for each token of a row."""

    clock, token_s = None, 0.0

    def forward(self, token_ids, cache, **arguments):
        self.clock.now += 2e-3 + self.token_s * token_ids.shape[1]
        return super().forward(token_ids, cache, **arguments)


class TimedDrafter(ScriptedDrafter):
    clock, draft_s = None, 0.0

    def propose(self, rows, committed, lengths, features=None):
        draft = super().propose(rows, committed, lengths, features)
        self.clock.now += self.draft_s * int(draft.num_drafted.max())
        return draft


def target(clock, token_s=0.0):
    model = TimedTable.reciting(TEXT, vocab_size=16)
    model.clock, model.token_s = clock, token_s
    return Target(model=model)


def perfect_drafter(clock, draft_s):
    drafter = TimedDrafter(lambda prefix, position: TEXT[position])
    drafter.clock, drafter.draft_s = clock, draft_s
    return drafter


def decoded(clock, drafter):
    decoder = SpeculativeDecoder(target(clock), drafter, num_draft_tokens="auto")
    return decoder.generate([TEXT[:5]], max_new_tokens=80)


def test_costs_are_those_of_the_clock(clock):
    policy = measured_policy(target(clock, token_s=1e-3), perfect_drafter(clock, 1.5e-3))
    # A pass over one token takes 3 ms, over nine 11 ms; a drafted token 1.5 ms.
    assert policy.draft_cost == pytest.approx(0.5)
    assert policy.draft_start == pytest.approx(0.0)
    assert policy.verify_cost == pytest.approx([(3 + k) / 3 for k in range(9)])


def test_what_drafting_costs_the_pass_behind_it_counts(clock):
    slowed = target(clock)

    class Disturbing(TimedDrafter):
        def propose(self, rows, committed, lengths, features=None):
            draft = super().propose(rows, committed, lengths, features)
            if draft.num_drafted.any():
                real, slowed.model.forward = slowed.model.forward, forward_later
                slowed.model.real_forward = real
            return draft

    def forward_later(*arguments, **named):
        slowed.model.forward = slowed.model.real_forward
        clock.now += 1e-3
        return slowed.model.forward(*arguments, **named)

    drafter = Disturbing(lambda prefix, position: TEXT[position])
    drafter.clock = clock
    policy = measured_policy(slowed, drafter)
    assert policy.draft_start == pytest.approx(0.5)
    assert policy.verify_cost == pytest.approx((1.0,) * 9)


def test_free_drafts_are_long_and_dear_ones_are_not_made(clock):
    cheap = decoded(clock, perfect_drafter(clock, 0.0))
    assert cheap.stats.acceptance_length > 6.0
    dear = decoded(clock, perfect_drafter(clock, 8e-3))  # four passes of the target a token
    assert dear.stats.num_drafted == 0
    assert dear.token_ids == cheap.token_ids == [TEXT[5:85]]


def test_costs_are_measured_once_and_nothing_else_is_remembered(clock, monkeypatch):
    at_hand, drafter = target(clock), perfect_drafter(clock, 0.0)
    decoder = SpeculativeDecoder(at_hand, drafter, num_draft_tokens="auto")
    first = decoder.generate([TEXT[:5]], max_new_tokens=40)
    monkeypatch.setattr(auto_length, "_measure", None)
    second = decoder.generate([TEXT[:5]], max_new_tokens=40)
    other = SpeculativeDecoder(at_hand, drafter, num_draft_tokens="auto")
    third = other.generate([TEXT[:5]], max_new_tokens=40)
    drafted = [[one.drafted for one in generation.rounds] for generation in (first, second, third)]
    assert drafted[0] == drafted[1] == drafted[2]
    with pytest.raises(TypeError):  # another batch size has costs of its own
        decoder.generate([TEXT[:5]] * 2, max_new_tokens=4)


def test_measuring_is_in_front_of_the_clock_of_a_call(clock):
    generation = decoded(clock, perfect_drafter(clock, 8e-3))
    assert generation.prefill_s == pytest.approx(2e-3)
    assert generation.seconds == pytest.approx(80 * 2e-3)
    assert clock.now > 2 * generation.seconds


def test_a_drafter_that_remembers_does_not_remember_what_was_only_measured(clock):
    known = {"min_survival": 0.5, "tokens_per_match": 1.0}
    lookup = SuffixLookupDrafter(remembers=True)
    for drafter in (lookup, CompositeDrafter(lookup, perfect_drafter(clock, 0.0))):
        measured_policy(target(clock), drafter)
        assert lookup.corpus.continuation(TEXT[:2], 2, **known).token_ids == []
    SpeculativeDecoder(target(clock), drafter, num_draft_tokens="auto").generate(
        [TEXT[:5]], max_new_tokens=9
    )
    assert lookup.corpus.continuation(TEXT[:2], 2, **known).token_ids == TEXT[2:4]


def test_a_draft_that_only_pays_when_it_is_long_is_begun():
    # Passes are padded to 1, 2, 4, 8, 16 tokens (compiled.py), and a draft costs half a pass to
    # begin: one token never pays, seven do.
    steps = (1.0, 1.9, 1.9, 1.9, 1.9, 1.9, 1.9, 1.9)
    policy = CostAware(0.0, steps, acceptance=0.9, draft_start=0.5)
    session = policy.begin(1)
    assert session.wants_more(0, [])
    short = CostAware(0.0, steps[:2], acceptance=0.9, draft_start=0.5).begin(1)
    assert not short.wants_more(0, [])


def test_without_a_drafter_auto_is_plain_decoding(clock):
    generation = SpeculativeDecoder(target(clock), num_draft_tokens="auto").generate(
        [TEXT[:5]], max_new_tokens=5
    )
    assert generation.stats.num_drafted == 0


def test_another_word_than_auto_is_refused(clock):
    with pytest.raises(ValueError, match="num_draft_tokens is 'fast', expected a number"):
        SpeculativeDecoder(target(clock), perfect_drafter(clock, 0.0), num_draft_tokens="fast")


def test_line_through_drafting_times():
    assert fit_line({1: 3.0, 2: 5.0, 4: 9.0}) == pytest.approx((1.0, 2.0))
    assert fit_line({3: 6.0}) == pytest.approx((0.0, 2.0))
    assert fit_line({}) == (0.0, 0.0)
    assert fit_line({0: 0.5}) == (0.5, 0.0)  # looked and found nothing
    assert fit_line({1: 2.0, 2: 2.0, 4: 2.0}) == pytest.approx((2.0, 0.0))


def test_passes_are_timed_for_every_width(clock):
    model = target(clock, token_s=1e-3).model
    seconds = time_passes(model, TEXT[:4], max_draft_tokens=2, batch_size=2, num_passes=2)
    assert seconds == pytest.approx([3e-3, 4e-3, 5e-3])
