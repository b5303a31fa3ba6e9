"""Costs of a round, measured: passes of the target over 1 to K + 1 tokens, drafting, the rest.

The decoder's own round timers tell what each part takes in real rounds with the real drafters. All
drafters of a page and plain decoding go on in turns (specdec_runtime/round_times.py), behind several
of its prompts, and every time is taken in passes of the target over one token that ran beside it.
So there is one target pass for the page, and what the machine does meanwhile drops out. A pass over
K + 1 tokens is the target's alone: all drafters' rounds tell of it. Draft lengths that are not
decoded are timed as bare passes, scaled to the ones that are.

Units: passes of the target over one token, and seconds.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from eval.cost_model import RoundCosts
from eval.results import CostResult
from specdec_runtime.auto_length import fit_line
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.draft import Drafter
from specdec_runtime.results import Round
from specdec_runtime.round_times import rounds_in_turns
from specdec_runtime.target import Target

NUM_PROMPTS = 3  # of a page that its costs are measured behind
TURN_ROUNDS = 10  # rounds of every decoder at every draft length behind each prompt
ENOUGH_ROUNDS = 4  # rounds of one draft length from which its cost is taken
TRIMMED = 0.1  # of the samples at either end: what something else ran beside


@dataclass
class _Samples:
    """Times of rounds in passes of the target over one token; keys: tokens drafted."""

    target_s: list[float] = field(default_factory=list)  # the unit, pass by pass
    plain_outside: list[float] = field(default_factory=list)
    verify: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    draft: dict[str, dict[int, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    outside: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def measure_costs(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Sequence[int]],
    *,
    max_draft_tokens: int,
    pass_s: Sequence[float],
    plain_token_s: float | None = None,
) -> list[CostResult]:
    """Costs of rounds with each of these drafters, by name.

    Args:
        prompts: texts to decode from; their mean length is the context that costs are stated for.
        pass_s: from `time_passes`, for draft lengths that are not decoded with.
        plain_token_s: seconds a token of the baseline, where that is not our own plain decoding.
    """
    lengths = run_lengths(max_draft_tokens)
    _run(target, drafters, prompts[0], lengths[0], 2)  # warms up
    samples = _Samples()
    for prompt in prompts:
        for length in lengths:
            _collect(_run(target, drafters, prompt, length, TURN_ROUNDS), drafters, samples)
    target_s = trimmed_mean(samples.target_s)
    plain_overhead = trimmed_mean(samples.plain_outside)
    if plain_token_s is not None:
        plain_overhead = plain_token_s / target_s - 1.0
    free = RoundCosts(
        target_s=target_s,
        verify=tuple(verify_costs(samples.verify, [one / pass_s[0] for one in pass_s])),
        draft_cost=0.0,
        overhead=0.0,
        plain_overhead=plain_overhead,
    )
    context_tokens = round(fmean(map(len, prompts)))
    return [_with_drafter(free, name, samples, context_tokens) for name in drafters]


def _with_drafter(
    free: RoundCosts, name: str, samples: _Samples, context_tokens: int
) -> CostResult:
    """The costs of rounds with one drafter.

    Args:
        free: what the target's passes cost.
    """
    drafting = {
        length: trimmed_mean(seen)
        for length, seen in samples.draft[name].items()
        if len(seen) >= ENOUGH_ROUNDS  # of rounds without a draft, where there are no others
    }
    start, token = fit_line(drafting)
    outside = trimmed_mean(samples.outside[name])
    return CostResult(
        drafter=name,
        context_tokens=context_tokens,
        verify_s=[free.target_s * cost for cost in free.verify],
        draft_token_s=free.target_s * token,
        draft_start_s=free.target_s * start,
        outside_s=free.target_s * outside,
        costs=replace(free, draft_cost=token, overhead=start + outside),
    )


def verify_costs(seen: Mapping[int, Sequence[float]], bare: Sequence[float]) -> list[float]:
    """v(0), v(1), ..., never falling: from rounds where there are enough, else from bare passes.

    Args:
        seen: costs of passes in rounds, by tokens drafted.
        bare: costs of bare passes over 1, 2, ... tokens; in rounds they take longer or shorter by
            the ratio at the draft lengths that are known, between them by one in between.
    """
    known = {k: trimmed_mean(v) for k, v in sorted(seen.items()) if k and len(v) >= ENOUGH_ROUNDS}
    ratios = {0: 1.0} | {k: cost / bare[k] for k, cost in known.items()}
    costs = [known.get(k, bare[k] * _between(ratios, k)) for k in range(1, len(bare))]
    weights = [len(seen.get(k, ())) or 1 for k in range(1, len(bare))]
    return [1.0, *(max(1.0, cost) for cost in rising(costs, weights))]


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest list that never falls (least squares): a pass over more tokens does more, so where
    it took less time, both were disturbed, and their mean is the best guess."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m, i), (b, n, j) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n, i + j)]
    return [mean for mean, _, count in pools for _ in range(count)]


def trimmed_mean(values: Sequence[float]) -> float:
    """Mean without the lowest and the highest tenth, one at least; unlike a median it sees both kinds
    of rounds of a drafter that is cheap in some of them."""
    cut = min(math.ceil(TRIMMED * len(values)), (len(values) - 1) // 2)
    return fmean(sorted(values)[cut : len(values) - cut])


def run_lengths(max_draft_tokens: int) -> list[int]:
    """Draft lengths that are decoded with: 1, 2, 3, 4, 8, 16, ... and the longest."""
    doubling = [2**i for i in range(max_draft_tokens.bit_length())]
    return sorted({*doubling, min(3, max_draft_tokens), max_draft_tokens})


def _between(known: Mapping[int, float], k: int) -> float:
    """A value at k from those beside it, along a straight line; behind the last: the last."""
    left = max(i for i in known if i <= k)
    right = min((i for i in known if i >= k), default=left)
    if left == right:
        return known[left]
    return known[left] + (known[right] - known[left]) * (k - left) / (right - left)


def _run(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompt: Sequence[int],
    num_draft_tokens: int,
    num_rounds: int,
) -> list[list[Round]]:
    """Rounds of plain decoding, then those of each drafter."""
    decoders = [SpeculativeDecoder(target, None, num_draft_tokens=0)]
    decoders += [
        SpeculativeDecoder(target, drafter, num_draft_tokens=num_draft_tokens)
        for drafter in drafters.values()
    ]
    return rounds_in_turns(decoders, [prompt], num_rounds=num_rounds)


def _collect(rounds: list[list[Round]], names: Mapping[str, Drafter], into: _Samples) -> None:
    """Add rounds that took turns, in passes of the target that ran beside them."""
    plain, *drafted = rounds
    unit = median(one.verify_s for one in plain)
    into.target_s += [one.verify_s for one in plain]
    into.plain_outside += [(one.draft_s + one.other_s) / unit for one in plain]
    for name, own in zip(names, drafted, strict=True):
        for i, one in enumerate(own):
            into.verify[one.drafted[0]].append(one.verify_s / unit)
            into.outside[name].append(one.other_s / unit)
            if i:  # in the first one the drafter reads the prompt
                into.draft[name][one.drafted[0]].append(one.draft_s / unit)
