"""What an evaluation found: the records behind results.json (see docs/results-schema.md).

Flat lists of records that name their drafter, suite and temperature, so that they load into a
table as they are. Greedy (temperature 0) and sampled decoding are never merged into one record.
"""

from dataclasses import dataclass, field
from typing import Any

from eval.cost_model import PartCheck, RoundCosts, RoundParts, Step
from eval.facts import DrafterFacts, Flag, SuiteFacts, TargetFacts
from eval.groups import BreakdownResult, CategoryResult
from eval.intervals import Interval
from eval.on_request import FormerFailures, PolicyResult, RivalResult, SweepPoint

SCHEMA_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class PromptCounts:
    """Acceptance of one prompt, as counts. `token_ids` are the new tokens, end token included.

    decoded: by the decoder that serves. Else the counts are replayed along the target's text: the
    decoder's own at temperature 0, their expectations (fractions) above (sampled_replay.py).
    """

    prompt_id: str
    num_rounds: float
    num_drafted: float
    num_accepted: float
    num_tokens: int
    drafted_by_position: list[float]
    accepted_by_position: list[float]
    finish_reason: str
    looping: bool
    decoded: bool = True
    token_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class AcceptanceResult:
    """Acceptance of one drafter on one suite at one temperature and draft length.

    Plain intervals pool all tokens (micro); `macro_` ones count each prompt once. seconds: of
    the decoding that the counts come from.
    """

    drafter: str
    suite: str
    temperature: float
    num_draft_tokens: int
    num_prompts: int
    num_looping: int
    num_rounds: float
    num_drafted: float
    num_accepted: float
    num_tokens: int
    acceptance_rate: Interval
    acceptance_length: Interval
    macro_acceptance_rate: Interval
    macro_acceptance_length: Interval
    acceptance_by_position: list[Interval]
    conditional_acceptance_by_position: list[Interval]
    seconds: float
    prompts: list[PromptCounts]

    @property
    def num_decoded(self) -> int:
        """Prompts whose counts are the decoder's, not replayed."""
        return sum(prompt.decoded for prompt in self.prompts)


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first token at which two greedy outputs of one prompt differ.

    top_two_gap: distance of the target's two highest logits there. kind: "near tie", "length"
    (one output is a prefix of the other) or "unexplained".
    """

    prompt_id: str
    position: int
    expected_token_id: int | None
    found_token_id: int | None
    top_two_gap: float | None
    kind: str


@dataclass(frozen=True, kw_only=True)
class IdentityCheck:
    """Greedy outputs of two decoders compared token by token.

    tolerance: top-two gaps up to this may flip by rounding alone; 0 demands identity.
    """

    name: str
    num_prompts: int
    num_identical: int
    num_tokens: int
    tolerance: float
    divergences: list[Divergence]

    @property
    def passed(self) -> bool:
        return all(divergence.kind == "near tie" for divergence in self.divergences)


@dataclass(frozen=True, kw_only=True)
class SamplingCheck:
    """A verification rule against the law of its target, by chi-squared tests on toys.

    smallest_p_value: over the toys. control_p_value: of the same rule with a wrong residual, which
    the test must reject. See sampling_check.py.
    """

    rule: str
    num_draws: int
    smallest_p_value: float
    control_p_value: float
    passed: bool


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Whether speculative decoding with this drafter returned the target's own text.

    Where `passed` is false, no speedup of the drafter is reported.
    """

    drafter: str
    engine: str
    dtype: str
    checks: list[IdentityCheck]
    self_draft_acceptance: float | None
    passed: bool
    summary: str


@dataclass(frozen=True, kw_only=True)
class ReplayedLength:
    """Acceptance at one draft length, computed from the recorded target outputs (temperature 0)."""

    num_draft_tokens: int
    num_rounds: int
    num_accepted: int
    acceptance_length: Interval
    rounds_by_drafted: dict[int, int]


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """One teacher-forced pass of a drafter over the target's own greedy outputs.

    agreement: share of all positions where draft and target agree on the top token.
    overlap: mean over positions of sum(min(target, draft)) at temperature 1.
    round_start_agreement: agreement at the positions where a round of `num_draft_tokens` starts;
    what decoding measures as acceptance at position 1 (`decoded_first_acceptance`).
    exact: whether the replayed acceptance equals the decoded one, count for count.
    """

    drafter: str
    suite: str
    num_draft_tokens: int
    num_positions: int
    agreement: Interval | None
    overlap: Interval | None
    round_start_agreement: Interval
    decoded_first_acceptance: Interval
    agrees: bool | None
    exact: bool
    lengths: list[ReplayedLength]


@dataclass(frozen=True, kw_only=True)
class SampledLength:
    """Acceptance to be expected at one draft length, above temperature 0."""

    num_draft_tokens: int
    acceptance_length: Interval


@dataclass(frozen=True, kw_only=True)
class SampledReplay:
    """Acceptance at every draft length along texts that the target sampled (sampled_replay.py).

    replayed, decoded: acceptance length at `num_draft_tokens` on `num_decoded` of the prompts, by
    replay and by the decoder with other draws; None where nothing was decoded. agrees: whether
    their intervals overlap.
    """

    drafter: str
    suite: str
    temperature: float
    num_draft_tokens: int
    num_prompts: int
    num_decoded: int
    replayed: Interval | None
    decoded: Interval | None
    agrees: bool | None
    lengths: list[SampledLength]


@dataclass(frozen=True, kw_only=True)
class DrafterDifference:
    """Acceptance length of another drafter minus that of the first, paired by prompt."""

    drafter: str
    suite: str
    temperature: float
    first: float
    second: float
    difference: Interval

    @property
    def is_sure(self) -> bool:
        """Whether the interval leaves out 0."""
        low, high = self.difference.low, self.difference.high
        return low is not None and high is not None and (low > 0 or high < 0)


@dataclass(frozen=True, kw_only=True)
class PassWeights:
    """The weights that a pass of a model reads.

    read_s: seconds of reading them once at the measured memory bandwidth; None for a model that is
    compiled already.
    """

    num_layers: int
    layer_weights: int
    head_rows: int
    head_weights: int
    read_s: float | None = None

    @property
    def weights(self) -> int:
        return self.layer_weights + self.head_weights


@dataclass(frozen=True, kw_only=True)
class CostResult:
    """Measured costs of one drafter, in seconds and in passes of the target over one token.

    target_weights, draft_weights: None where they are not known (what_if.py).
    """

    drafter: str
    context_tokens: int
    verify_s: list[float]
    draft_token_s: float
    draft_start_s: float
    outside_s: float
    costs: RoundCosts
    target_weights: PassWeights | None = None
    draft_weights: PassWeights | None = None


@dataclass(frozen=True, kw_only=True)
class BaselineCandidate:
    """One way this product can decode the target without a drafter."""

    name: str
    tokens_per_s: float
    used: bool


@dataclass(frozen=True, kw_only=True)
class PromptTimes:
    """One prompt on the clock: seconds with the prefill, one entry a repeat."""

    prompt_id: str
    plain_s: list[float]
    speculative_s: list[float]
    num_plain_tokens: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class SpeedResult:
    """Seconds of plain and of speculative decoding of the same prompts, batch size 1.

    Sums over prompts of medians over repeats; intervals resample both. speedup = plain_s / speculative_s per token,
    prefill included; decode_speedup leaves the prefill out. None where withheld. is_auto: the
    runtime chose every round's length itself, up to num_draft_tokens. plain_parts, parts: of the
    rounds; None where transformers decoded.
    """

    drafter: str
    suite: str
    num_draft_tokens: int
    is_auto: bool = False
    num_prompts: int
    num_repeats: int
    num_tokens: int
    plain_s: float
    speculative_s: float
    plain_prefill_s: float
    prefill_s: float
    plain_tokens_per_s: float
    tokens_per_s: float
    plain_ms_per_token: float
    ms_per_token: float
    plain_first_token_ms: float
    first_token_ms: float
    speedup: Interval | None
    decode_speedup: Interval | None
    mean_prompt_speedup: float | None
    repeat_speedups: list[float]
    acceptance_length: float | None
    rounds_by_drafted: dict[int, int]
    plain_parts: RoundParts | None = None
    parts: RoundParts | None = None
    prompts: list[PromptTimes] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class LengthPrediction:
    """The cost model at one draft length."""

    num_draft_tokens: int
    acceptance_length: float
    speedup: float
    break_even_acceptance: float | None


@dataclass(frozen=True)
class WhatIf:
    """The best predicted speedup if one thing changed. assumes: what is taken for granted."""

    name: str
    speedup: float
    assumes: str = ""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the measured acceptance and costs predict for one drafter and suite (temperature 0).

    best_num_draft_tokens: the shortest length whose predicted speedup is within 2 % of the highest.
    decomposition: speedup left after each cost in turn. what_if: the best predicted speedup if
    one thing changed. predicted_at_measured: of the timed prompts alone, with the acceptance they
    had. deviation: that / the measured decode speedup - 1. parts: where it comes from.
    """

    drafter: str
    suite: str
    lengths: list[LengthPrediction]
    best_num_draft_tokens: int
    best_speedup: float
    mean_acceptance: float | None
    decomposition: list[Step]
    what_if: list[WhatIf]
    measured_num_draft_tokens: int | None
    predicted_at_measured: float | None
    deviation: float | None
    parts: list[PartCheck] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer in words. pays: None where the interval holds 1, or the speedup is withheld."""

    drafter: str
    suite: str
    pays: bool | None
    headline: str
    sentence: str
    reason: str
    next_step: str


@dataclass(kw_only=True)
class Results:
    """Everything an evaluation found. `complete` is false while it runs or after it was stopped."""

    schema_version: int = SCHEMA_VERSION
    created: str
    complete: bool = False
    seconds: float = 0.0
    target: TargetFacts
    machine: dict[str, str]
    settings: dict[str, Any]
    suites: list[SuiteFacts] = field(default_factory=list)
    drafters: list[DrafterFacts] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    flags: list[Flag] = field(default_factory=list)
    exactness: list[Certificate] = field(default_factory=list)
    sampling: list[SamplingCheck] = field(default_factory=list)
    baselines: list[BaselineCandidate] = field(default_factory=list)
    speed: list[SpeedResult] = field(default_factory=list)
    acceptance: list[AcceptanceResult] = field(default_factory=list)
    replay: list[ReplayResult] = field(default_factory=list)
    sampled_replay: list[SampledReplay] = field(default_factory=list)
    differences: list[DrafterDifference] = field(default_factory=list)
    breakdown: list[BreakdownResult] = field(default_factory=list)
    categories: list[CategoryResult] = field(default_factory=list)
    former_failures: list[FormerFailures] = field(default_factory=list)
    costs: list[CostResult] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    policies: list[PolicyResult] = field(default_factory=list)
    rivals: list[RivalResult] = field(default_factory=list)
    sweeps: list[SweepPoint] = field(default_factory=list)
