"""Draft-length policies replayed: one recording of drafts and confidences, any policy from it.

At temperature 0 what a drafter proposes from a position of the target's text, and how
sure it is of each token, does not depend on the policy. So the drafts are recorded once, as long as
the longest, and a policy is then asked exactly as the decoder asks it, round after round: counts,
and whatever it learns on the way, are those of decoding with it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval.asking import asked_along
from eval.cost_model import RoundCosts, predicted_speedup
from eval.on_request import PolicyResult
from eval.replay import common_prefix
from eval.target_texts import Answer, TargetStates
from specdec_runtime.draft import Drafter
from specdec_runtime.draft_length import (
    ConfidenceThreshold,
    CostAware,
    DraftLength,
    FixedLength,
)
from specdec_runtime.stats import AcceptanceStats

THRESHOLDS = (0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True)
class RecordedDraft:
    """What would be drafted from one position: how many tokens match the text, the confidences."""

    num_matching: int
    confidences: list[float | None]


def policies(costs: RoundCosts, num_draft_tokens: int) -> dict[str, DraftLength]:
    """The policies that are compared, by the name that the report uses."""
    found: dict[str, DraftLength] = {
        f"fixed, {num_draft_tokens}": FixedLength(num_draft_tokens),
        **{
            f"confidence {threshold:g}, at most {costs.max_draft_tokens}": ConfidenceThreshold(
                threshold, costs.max_draft_tokens
            )
            for threshold in THRESHOLDS
        },
    }
    found["by measured costs"] = CostAware(
        draft_cost=costs.draft_cost,
        verify_cost=tuple(costs.verify),
        draft_start=max(costs.overhead - costs.plain_overhead, 0.0),
    )
    return found


def record(
    states: TargetStates, drafter: Drafter, answer: Answer, *, max_draft_tokens: int
) -> list[RecordedDraft]:
    """The longest draft from every position of an answer but the first."""
    recorder, drafts = _Recorder(max_draft_tokens), []
    for asked in asked_along(
        states, drafter, answer, recorder, most=max_draft_tokens, needs_confidence=True
    ):
        rest = answer.token_ids[asked.position :]
        drafts.append(RecordedDraft(common_prefix(asked.token_ids, rest), recorder.confidences))
    return drafts


def policy_stats(
    policy: DraftLength, answer: Answer, drafts: Sequence[RecordedDraft]
) -> tuple[AcceptanceStats, Counter[int]]:
    """The counts of decoding this answer with a policy, and how many rounds submitted how many."""
    stats, submitted = AcceptanceStats(num_tokens=len(answer.token_ids)), Counter[int]()
    session = policy.begin(1)
    position, end = 1, len(answer.token_ids)  # token 0 comes from the prefill
    while position < end:
        draft = drafts[position - 1]
        limit = min(answer.max_new_tokens - position - 1, len(draft.confidences))
        drafted = 0
        while drafted < limit and session.wants_more(0, draft.confidences[:drafted]):
            drafted += 1
        accepted = min(drafted, draft.num_matching)
        session.end_round(0, draft.confidences[:drafted], accepted)
        submitted[drafted] += 1
        judged = accepted if position + accepted >= end else drafted
        stats.add_round(judged, accepted)
        position += accepted + 1
    return stats, submitted


def compare_policies(
    answers: Sequence[Answer],
    drafts: Sequence[Sequence[RecordedDraft]],
    compared: Mapping[str, DraftLength],
    costs: RoundCosts,
    *,
    drafter: str,
    suite: str,
) -> list[PolicyResult]:
    """Acceptance and predicted speedup of every policy on the same recording."""
    results = []
    for name, policy in compared.items():
        stats, submitted = AcceptanceStats(), Counter[int]()
        for answer, recorded in zip(answers, drafts, strict=True):
            one, rounds = policy_stats(policy, answer, recorded)
            stats, submitted = stats + one, submitted + rounds
        num_rounds = sum(submitted.values())
        if not num_rounds:
            continue
        sure = policy if isinstance(policy, ConfidenceThreshold) else None
        results.append(
            PolicyResult(
                drafter=drafter,
                suite=suite,
                policy=name,
                num_rounds=num_rounds,
                num_accepted=stats.num_accepted,
                mean_drafted=sum(k * n for k, n in submitted.items()) / num_rounds,
                acceptance_length=1.0 + stats.num_accepted / num_rounds,
                speedup=predicted_speedup(1.0 + stats.num_accepted / num_rounds, costs, submitted),
                threshold=None if sure is None else sure.threshold,
                max_draft_tokens=None if sure is None else sure.num_draft_tokens,
            )
        )
    return results


class _Recorder:
    """A policy's session that always drafts on, and keeps the confidences of the last round."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self.confidences: list[float | None] = []

    def wants_more(self, row: int, confidences: Sequence[float | None]) -> bool:
        return len(confidences) < self._num_draft_tokens

    def end_round(self, row: int, confidences: Sequence[float | None], num_accepted: int) -> None:
        self.confidences = list(confidences)
