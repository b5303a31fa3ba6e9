"""Costs of a round, measured: passes of the target over 1 to K + 1 tokens, drafting, the rest.

The decoder's own round timers tell what each part takes in real rounds with the real drafter (whose
weights compete for the same caches); draft lengths that a drafter rarely reaches are timed as bare
passes. Runs of different draft lengths are interleaved, medians are taken.

Units: seconds, and passes of the target over one token.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from eval.cost_model import RoundCosts
from eval.results import CostResult
from specdec_runtime.auto_length import fit_line
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.draft import Drafter
from specdec_runtime.results import Generation
from specdec_runtime.target import Target

NUM_RUNS = 2  # interleaved decodes of each draft length that is run
RUN_TOKENS = 12  # new tokens of such a run, beyond the draft length
ENOUGH_ROUNDS = 3  # rounds of one draft length from which a median is taken


class DecodeTimes(NamedTuple):
    """Round timers of the runs of one drafter, by number of tokens drafted in the round."""

    verify_s: dict[int, list[float]]
    draft_s: dict[int, list[float]]
    outside_s: list[float]  # per run: seconds a round outside drafting and verification


def measure_costs(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    name: str,
    max_draft_tokens: int,
    pass_s: Sequence[float],
    plain_token_s: float | None = None,
) -> CostResult:
    """Costs of rounds with this drafter.

    Args:
        plain_token_s: seconds a token of the baseline, where that is not our own plain decoding.
        prompt: the text to decode from; its length is the context that costs are stated for.
        pass_s: from `time_passes`, for draft lengths that the drafter does not reach.
    """
    plain, drafted = _run(target, drafter, prompt, max_draft_tokens)
    target_s = median(plain.verify_s[0])
    verify_s = [target_s]
    scale = target_s / pass_s[0]  # a pass within decoding against a bare one
    for k in range(1, max_draft_tokens + 1):
        seen = drafted.verify_s.get(k, [])
        verify_s.append(median(seen) if len(seen) >= ENOUGH_ROUNDS else scale * pass_s[k])
    verify_s[1:] = no_dearer_than_longer(verify_s[1:])
    start_s, token_s = fit_line(
        {k: median(seen) for k, seen in drafted.draft_s.items() if k and len(seen) >= ENOUGH_ROUNDS}
    )
    outside_s = median(drafted.outside_s)
    if plain_token_s is None:
        plain_token_s = target_s + median(plain.outside_s)
    return CostResult(
        drafter=name,
        context_tokens=len(prompt),
        verify_s=verify_s,
        draft_token_s=token_s,
        draft_start_s=start_s,
        outside_s=outside_s,
        costs=RoundCosts(
            target_s=target_s,
            verify=tuple(seconds / target_s for seconds in verify_s),
            draft_cost=token_s / target_s,
            overhead=(start_s + outside_s) / target_s,
            plain_overhead=plain_token_s / target_s - 1.0,
        ),
    )


def no_dearer_than_longer(seconds: Sequence[float]) -> list[float]:
    """Seconds of passes over more and more tokens, none above those behind it: a pass over fewer
    tokens does less, so where it took longer something else was running."""
    return list(accumulate(reversed(seconds), min))[::-1]


def _run(
    target: Target, drafter: Drafter, prompt: Sequence[int], max_draft_tokens: int
) -> tuple[DecodeTimes, DecodeTimes]:
    """Interleaved short decodes at every draft length; (plain, drafted)."""
    plain, drafted = (DecodeTimes(defaultdict(list), defaultdict(list), []) for _ in range(2))
    room = target.model.max_positions - len(prompt)
    lengths = run_lengths(max_draft_tokens)
    for turn in range(NUM_RUNS + 1):
        for k in lengths if turn else lengths[:2]:  # turn 0 warms up
            decoder = SpeculativeDecoder(target, drafter if k else None, num_draft_tokens=k)
            generation = decoder.generate(
                [prompt], max_new_tokens=min(RUN_TOKENS + k, room), eos_token_id=()
            )
            if turn:
                _collect(generation, drafted if k else plain)
    return plain, drafted


def run_lengths(max_draft_tokens: int) -> list[int]:
    """Draft lengths that are decoded with: 0, 1, 2, 4, ... and the longest."""
    doubling = [2**i for i in range(max_draft_tokens.bit_length())]
    return sorted({0, *doubling, max_draft_tokens})


def _collect(generation: Generation, into: DecodeTimes) -> None:
    """Add a run's timers. Its first round is left out: the drafter reads the prompt there."""
    rounds = generation.rounds
    for i, one in enumerate(rounds):
        into.verify_s[one.drafted[0]].append(one.verify_s)
        if i:
            into.draft_s[one.drafted[0]].append(one.draft_s)
    inside = sum(one.draft_s + one.verify_s for one in rounds)
    if rounds:
        into.outside_s.append((generation.seconds - generation.prefill_s - inside) / len(rounds))
