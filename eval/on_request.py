"""What is measured on request only: records of results.py."""

from dataclasses import dataclass

from eval.intervals import Interval


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """A draft-length policy on the target's greedy texts; speedup: predicted from measured costs.

    threshold, max_draft_tokens: of a policy that drafts on while it is surer than that.
    """

    drafter: str
    suite: str
    policy: str
    num_rounds: int
    num_accepted: int
    mean_drafted: float
    acceptance_length: float
    speedup: float
    threshold: float | None = None
    max_draft_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class RivalResult:
    """Another program decoding with the same drafter; num_identical: texts equal to ours."""

    drafter: str
    suite: str
    program: str
    num_draft_tokens: int
    num_prompts: int
    num_identical: int
    ms_per_token: float
    rival_ms_per_token: float


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """Plain and speculative decoding at one batch size and context length, prefill excluded.

    measured: by the clock; else predicted from the costs measured there.
    """

    drafter: str
    batch_size: int
    context_tokens: int
    num_draft_tokens: int
    plain_tokens_per_s: float
    tokens_per_s: float
    speedup: float
    measured: bool


@dataclass(frozen=True, kw_only=True)
class FormerFailures:
    """Places where an earlier drafter failed, asked again. right: now proposed as the target has it."""

    drafter: str
    num_prefixes: int
    num_right: int
    right: Interval
