"""`num_draft_tokens="auto"`: cost-aware drafting with the costs of this machine, measured by itself.

Before the first call with a drafter a few short rounds and bare passes are timed (about as long as
100 decoded tokens take); the costs stay in memory for the process, one set per model, drafter,
batch size and way of sampling. Nothing else is kept from call to call: what a row accepts is
learned anew in each. Where drafting does not pay, rows stop drafting by themselves.

A sampled text depends on its seed and on the draft lengths, hence on the measured costs: to repeat
one exactly, measure once (`measured_policy`) and pass the policy on.
"""

import time
from collections.abc import Sequence
from statistics import median
from weakref import WeakKeyDictionary

import torch

from specdec_runtime.draft import Drafter, without_learning
from specdec_runtime.draft_length import ConfidenceThreshold, CostAware, DraftLength, FixedLength
from specdec_runtime.model import CausalModel
from specdec_runtime.results import Round
from specdec_runtime.target import Target

MAX_DRAFT_TOKENS = 8
_CONTEXT_TOKENS = 64  # costs are those behind a context of this length
_NUM_TURNS = 8  # timed rounds of each draft length, in turns; the first warms up
_NUM_PASSES = 5

_Key = tuple[int, bool, int]  # batch size, whether rows sample, longest draft
_measured: "WeakKeyDictionary[CausalModel, WeakKeyDictionary[Drafter, dict[_Key, CostAware]]]" = (
    WeakKeyDictionary()
)


def measured_policy(
    target: Target,
    drafter: Drafter,
    *,
    batch_size: int = 1,
    is_sampled: bool = False,
    max_draft_tokens: int = MAX_DRAFT_TOKENS,
) -> CostAware:
    """Cost-aware drafting with what drafting and verifying cost here.

    Measured at the first call for these arguments, then taken from memory.

    Args:
        batch_size: rows decoded together; a pass over more rows makes drafted tokens dearer.
        is_sampled: whether any row has a temperature above 0.
        max_draft_tokens: longest draft of a round.
    """
    known = _measured.setdefault(target.model, WeakKeyDictionary()).setdefault(drafter, {})
    key = (batch_size, is_sampled, max_draft_tokens)
    if key not in known:
        known[key] = _measure(target, drafter, *key)
    return known[key]


def _measure(
    target: Target, drafter: Drafter, batch_size: int, is_sampled: bool, most: int
) -> CostAware:
    length = min(_CONTEXT_TOKENS, target.model.max_positions // 4)
    # Ids from all over the vocabulary: no text, so that no drafter finds anything to copy.
    context = [(7919 * i) % target.real_vocab_size for i in range(1, length + 1)]
    prompts = [context] * batch_size
    policies = (FixedLength(0), ConfidenceThreshold(0.0, 1), ConfidenceThreshold(0.0, most))
    plain, one, longest = _rounds(target, drafter, prompts, policies, is_sampled=is_sampled)
    outside_s = median(entry.other_s for entry in plain)
    plain_s = median(entry.verify_s for entry in plain) + outside_s
    passes = time_passes(
        target.model, context, max_draft_tokens=most, batch_size=batch_size, num_passes=_NUM_PASSES
    )
    # Bare passes scaled to what a whole round takes: with sampling, verdict and bookkeeping.
    scale = (plain_s - outside_s) / passes[0]
    verify_s = [scale * seconds + outside_s for seconds in passes]
    start_s, token_s = fit_line(_draft_seconds([*one, *longest]))
    return CostAware(
        draft_cost=token_s / plain_s,
        verify_cost=tuple(seconds / plain_s for seconds in verify_s),
        draft_start=max(start_s + _disturbance(one, verify_s), 0.0) / plain_s,
    )


def _disturbance(rounds: Sequence[Round], verify_s: Sequence[float]) -> float:
    """Seconds that verifying takes longer in rounds that draft than by the bare passes.

    Drafting pushes out of the caches what the target's pass and the loop would find there; and what
    few bare passes say of their width is uncertain, so that it may be below 0. `rounds` draft a single
    token: what such a round costs is then what it took.
    """
    excess = [
        entry.verify_s + entry.other_s - verify_s[max(entry.drafted)]
        for entry in rounds
        if any(entry.drafted)
    ]
    return median(excess) if excess else 0.0


def _rounds(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    policies: Sequence[DraftLength],
    *,
    is_sampled: bool,
) -> list[list[Round]]:
    """Rounds of real decoding with each policy; the first, which reads the prompt, is left out."""
    # They import this module.
    from specdec_runtime.decode import SpeculativeDecoder
    from specdec_runtime.round_times import rounds_in_turns

    decoders = [
        SpeculativeDecoder(target, without_learning(drafter), num_draft_tokens=policy)
        for policy in policies
    ]
    temperature = 1.0 if is_sampled else 0.0
    rounds = rounds_in_turns(decoders, prompts, num_rounds=_NUM_TURNS, temperature=temperature)
    return [of_one[1:] for of_one in rounds]


def _draft_seconds(rounds: Sequence[Round]) -> dict[int, float]:
    """Median seconds of drafting by number of tokens drafted; rounds that drafted nothing: 0."""
    by_drafted: dict[int, list[float]] = {}
    for entry in rounds:
        by_drafted.setdefault(max(entry.drafted), []).append(entry.draft_s)
    return {drafted: median(seconds) for drafted, seconds in by_drafted.items()}


@torch.inference_mode()
def time_passes(
    model: CausalModel,
    token_ids: Sequence[int],
    *,
    max_draft_tokens: int,
    batch_size: int = 1,
    num_passes: int = 7,
) -> list[float]:
    """Seconds of a pass over K + 1 tokens behind `token_ids`, for K = 0 to `max_draft_tokens`.

    Medians of `num_passes` interleaved passes of each width, after one to warm up; 7 shrug off
    three disturbed ones.
    """
    start = len(token_ids)
    cache = model.new_cache(batch_size, start + max_draft_tokens + 1)
    model.forward(torch.tensor([list(token_ids)] * batch_size), cache, last_only=True)
    new = torch.tensor([[token_ids[i % start] for i in range(max_draft_tokens + 1)]] * batch_size)
    times: list[list[float]] = [[] for _ in range(max_draft_tokens + 1)]
    for turn in range(num_passes + 1):
        for k, taken in enumerate(times):
            begun = time.perf_counter()
            output = model.forward(
                new[:, : k + 1], cache, logits=False, likeliest_of=model.vocab_size
            )
            assert output.likeliest is not None
            output.likeliest.tolist()  # waits for the device, as the decoder does
            if turn:
                taken.append(time.perf_counter() - begun)
            cache.truncate([start] * batch_size)
    return [median(taken) for taken in times]


def fit_line(seconds_by_drafted: dict[int, float]) -> tuple[float, float]:
    """(seconds to start a draft, seconds per drafted token), neither below 0: least squares.

    One draft length alone is all slope; none at all (nothing drafted) is free.
    """
    drafts = {k: seconds for k, seconds in seconds_by_drafted.items() if k}
    if not drafts:
        return seconds_by_drafted.get(0, 0.0), 0.0
    mean_k = sum(drafts) / len(drafts)
    mean_s = sum(drafts.values()) / len(drafts)
    spread = sum((k - mean_k) ** 2 for k in drafts)
    if spread == 0:
        return 0.0, mean_s / mean_k
    slope = sum((k - mean_k) * (s - mean_s) for k, s in drafts.items()) / spread
    slope = max(slope, 0.0)
    start = mean_s - slope * mean_k
    if start < 0:
        return 0.0, mean_s / mean_k
    return start, slope
