"""How long an evaluation will take, part by part, and how to make it fit its time limit.

Estimates rest on two things measured first: the seconds of a pass of the target over one token and
over a prompt. They are printed before the work starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eval.config import EvaluationConfig
from eval.costs import NUM_PROMPTS, TURN_ROUNDS, run_lengths
from eval.rivals import NUM_REPEATS as RIVAL_REPEATS
from eval.sweeps import NUM_REPEATS as BATCH_REPEATS

GUESSED_LENGTH = 1.4  # tokens a round, before anything is known
GUESSED_DRAFTING = 0.25  # drafting and overhead of a round, as a share of a pass
TIMED_SHARE = 0.3  # of the time limit that timing may always use
LEAST_PROMPTS = 6  # a suite; fewer would make intervals that say little, however busy the machine
REFERENCE_SHARE = 0.1  # of the time limit, at most, for decoding with transformers
SCORING = 1.5  # of a pass over a text: the whole vocabulary at every position, and its sums
REPLAY = 0.25  # of a pass over a text: what a drafter would have proposed along it
FOLLOWING = 1.5  # the same where every draft is followed from its own place (state_drafts.py)
RECORDING = 2.5  # of a pass over a text: the longest draft from every place, with confidences
RIVAL_SLOWNESS = 6  # of another program and ours together, in passes of our target
LONG_CONTEXT = 1.5  # a long prompt's pass, in what its number of tokens alone would make it
OTHER_PASSES = 1000  # passes over one token: baselines, sampling rules, self-draft, traces
FINISHING_PASSES = 300  # of these, what comes behind the timing: traces, weak places, the page


@dataclass(frozen=True)
class PassTime:
    """Seconds of a pass of the target over one token, and of every token more in a long one."""

    one_s: float
    more_s: float

    def over(self, num_tokens: float) -> float:
        return self.one_s + self.more_s * (num_tokens - 1)


@dataclass(frozen=True)
class PartTime:
    """Estimated seconds of one part."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Amounts:
    """What is to be decoded, on one or more suites.

    num_recorded: of the drafters, those whose acceptance above temperature 0 is replayed too, a few
        prompts being decoded.
    num_followed: of the drafters, those that go on from states of their own.
    """

    num_suites: int
    num_prompts: int  # of one suite
    prompt_tokens: float  # mean
    num_drafters: int
    num_recorded: int
    num_followed: int
    num_temperatures: int


def estimate(a_pass: PassTime, amounts: Amounts, config: EvaluationConfig) -> list[PartTime]:
    """Seconds of each part but the timing, which comes last and takes what is left."""
    suites, temperatures = amounts.num_suites, amounts.num_temperatures
    texts = suites * temperatures * _decoding(a_pass, amounts, amounts.num_prompts, 0, config)
    whole = _decoding(a_pass, amounts, amounts.num_prompts, config.num_draft_tokens, config)
    few = min(config.decoded_prompts, amounts.num_prompts)
    checks = _decoding(a_pass, amounts, few, config.num_draft_tokens, config)
    # A few texts on every suite at temperature 0, on the first one above it.
    decoded = amounts.num_drafters * suites * checks
    sampled = amounts.num_recorded * checks
    sampled += (amounts.num_drafters - amounts.num_recorded) * suites * whole
    decoded += (temperatures - 1) * sampled
    a_text = a_pass.over(amounts.prompt_tokens + config.max_new_tokens)
    replays = SCORING + REPLAY * (amounts.num_drafters - amounts.num_followed)
    replays += FOLLOWING * amounts.num_followed
    read = suites * temperatures * amounts.num_prompts * a_text * replays
    a_turn = TURN_ROUNDS * a_pass.over(config.max_draft_tokens / 2)
    a_turn += a_pass.over(amounts.prompt_tokens)
    turns = NUM_PROMPTS * len(run_lengths(config.max_draft_tokens))
    costs = turns * (amounts.num_drafters + 1) * a_turn + OTHER_PASSES * a_pass.one_s
    compared = REFERENCE_SHARE * config.time_limit_s if config.reference_prompts else 0.0
    return [
        PartTime("the target's texts", texts),
        PartTime("comparison with transformers up to", compared),
        PartTime("costs of a round", costs),
        PartTime("decoding with the drafters", decoded),
        PartTime("replays and weak places", read),
        *_on_request(a_pass, amounts, config),
    ]


def _on_request(a_pass: PassTime, amounts: Amounts, config: EvaluationConfig) -> list[PartTime]:
    """Seconds of what the settings ask for besides; nothing is listed that they do not."""
    a_text = a_pass.over(amounts.prompt_tokens + config.max_new_tokens)
    policies = RECORDING * a_text * amounts.num_suites * amounts.num_prompts
    rounds = config.max_new_tokens / GUESSED_LENGTH * a_pass.over(config.num_draft_tokens + 1)
    rivals = RIVAL_SLOWNESS * rounds * RIVAL_REPEATS * config.rival_prompts * amounts.num_drafters
    batches = sum(
        BATCH_REPEATS * _decoding(a_pass, amounts, size, length, replace(config, batch_size=size))
        for size in config.batch_sizes
        for length in (0, *(config.also_time or [2]))
    )
    lengths = len(run_lengths(config.max_draft_tokens))
    a_length = 2 * TURN_ROUNDS * a_pass.over(config.max_draft_tokens / 2)
    contexts = sum(
        lengths * (2 * LONG_CONTEXT * a_pass.over(size) + a_length)
        for size in config.context_lengths
    )
    parts = [
        PartTime("policies", policies if config.policies else 0.0),
        PartTime("other programs", rivals),
        PartTime("batch sizes", batches),
        PartTime("context lengths", contexts),
    ]
    return [part for part in parts if part.seconds]


def _decoding(
    a_pass: PassTime,
    amounts: Amounts,
    num_prompts: int,
    num_draft_tokens: int,
    config: EvaluationConfig,
) -> float:
    """Seconds of decoding so many prompts of a suite in batches; without drafts, plainly."""
    rounds = config.max_new_tokens / (GUESSED_LENGTH if num_draft_tokens else 1)
    extra = 1 + GUESSED_DRAFTING if num_draft_tokens else 1.0
    seconds = 0.0
    for first in range(0, num_prompts, config.batch_size):
        rows = min(config.batch_size, num_prompts - first)
        seconds += a_pass.over(rows * amounts.prompt_tokens)
        seconds += rounds * extra * a_pass.over(rows * (num_draft_tokens + 1))
    return seconds


def fit_prompts(a_pass: PassTime, amounts: Amounts, config: EvaluationConfig) -> Amounts:
    """Fewer prompts a suite where the estimate exceeds the share of the limit; never below LEAST_PROMPTS."""
    allowed = (1 - TIMED_SHARE) * config.time_limit_s
    while (
        amounts.num_prompts > LEAST_PROMPTS and total(estimate(a_pass, amounts, config)) > allowed
    ):
        amounts = replace(amounts, num_prompts=amounts.num_prompts - 1)
    return amounts


def total(parts: Sequence[PartTime]) -> float:
    """Seconds of all parts."""
    return sum(part.seconds for part in parts)


def describe(parts: Sequence[PartTime]) -> str:
    """`about 95 s: plain greedy texts 20 s, ...`."""
    listed = ", ".join(f"{part.name} {part.seconds:.0f} s" for part in parts)
    return f"about {total(parts):.0f} s: {listed}"
