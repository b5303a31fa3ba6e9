"""The measurements of an evaluation, each kept on disk once it is done (parts.py)."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from eval.budget import PassTime
from eval.config import EvaluationConfig
from eval.costs import NUM_PROMPTS, measure_costs
from eval.exactness import self_draft_acceptance
from eval.facts import DrafterFacts
from eval.former_failures import asked_again
from eval.inspection import AnswerScores, score_answer
from eval.on_request import FormerFailures, PolicyResult, RivalResult, SweepPoint
from eval.parts import Parts
from eval.policies import compare_policies, policies, record
from eval.progress import Stage
from eval.reference import Reference, find_baseline, noise_tolerance, reference_checks
from eval.replay import Proposals, replay
from eval.results import (
    AcceptanceResult,
    BaselineCandidate,
    CostResult,
    IdentityCheck,
    ReplayedLength,
    ReplayResult,
    SamplingCheck,
)
from eval.rivals import measure_rival
from eval.sampling_check import sampling_checks
from eval.suites import EvalPrompt, spread
from eval.sweeps import batch_sweep, context_sweep
from eval.target_texts import Answer, TargetStates
from eval.text_drafts import ScoredDrafter
from eval.trace import WeakPrefix
from eval.what_if import draft_weights, memory_bandwidth, pass_weights
from specdec_runtime.auto_length import time_passes
from specdec_runtime.draft import Drafter
from specdec_runtime.target import Target

SELF_DRAFT_TOKENS = 32
TokenLists = list[list[int]]


@dataclass
class Setting:
    """What is measured on what; `suites` may shrink before the first measurement."""

    target: Target
    drafters: Mapping[str, Drafter]
    suites: dict[str, list[EvalPrompt]]
    config: EvaluationConfig
    parts: Parts
    stage: Stage
    reference: Reference
    states: TargetStates

    @property
    def first_suite(self) -> str:
        return next(iter(self.suites))

    @property
    def first_prompts(self) -> list[EvalPrompt]:
        return self.suites[self.first_suite]

    @property
    def bootstrap(self) -> dict[str, int]:
        return {"num_resamples": self.config.num_resamples, "seed": self.config.seed}


def passes(setting: Setting) -> list[float]:
    """Seconds of a pass over 1, 2, ... tokens behind the first prompt."""
    return setting.parts.get(
        "passes",
        list[float],
        lambda: time_passes(
            setting.target.model,
            setting.first_prompts[0].token_ids,
            max_draft_tokens=setting.config.max_draft_tokens,
        ),
    )


def pass_time(setting: Setting, one_s: float) -> PassTime:
    """What passes over many tokens take, by the quicker of two over a prompt of middling length.

    Args:
        one_s: seconds of a pass over one token.
    """
    prompts = sorted((p.token_ids for prompts in setting.suites.values() for p in prompts), key=len)
    ids, model = prompts[len(prompts) // 2], setting.target.model

    def seconds() -> float:
        cache = model.new_cache(1, len(ids))
        begun = time.perf_counter()
        logits = model.forward(torch.tensor([ids]), cache, last_only=True).logits
        assert logits is not None
        logits.argmax(-1).tolist()  # waits for the device
        return time.perf_counter() - begun

    whole_s = setting.parts.get("prompt pass", float, lambda: min(seconds(), seconds()))
    return PassTime(one_s, max(whole_s - one_s, 0.0) / max(len(ids) - 1, 1))


def tolerance(setting: Setting, text: list[int]) -> float:
    """Top-two gap that rounding can flip here; `text` is a greedy text of the first prompt."""
    sample = [*setting.first_prompts[0].token_ids, *text]
    width = setting.config.num_draft_tokens + 1
    return setting.parts.get(
        "tolerance", float, lambda: noise_tolerance(setting.target, sample, width=width)
    )


def self_acceptance(setting: Setting) -> float:
    """Acceptance rate of the target as its own drafter, on two prompts."""
    few = [p.token_ids for p in spread(setting.first_prompts, 2)]
    amount = min(SELF_DRAFT_TOKENS, setting.config.max_new_tokens)
    return setting.parts.get(
        "self draft",
        float,
        lambda: self_draft_acceptance(setting.target, few, max_new_tokens=amount),
    )


def sampling(setting: Setting) -> list[SamplingCheck]:
    """The verification rules on toys, on the target's device."""
    return setting.parts.get(
        "sampling", list[SamplingCheck], lambda: sampling_checks(setting.target.model.device)
    )


def transformers_checks(
    setting: Setting, texts: TokenLists, *, limit_s: float
) -> list[IdentityCheck]:
    """Plain texts of the first suite against transformers' own decoding."""
    prompts = setting.first_prompts
    few = min(setting.config.reference_prompts, len(prompts))

    def compute() -> list[IdentityCheck]:
        with setting.stage("texts of transformers", len(prompts) + few) as advance:
            return reference_checks(
                setting.target,
                setting.reference,
                prompts,
                texts,
                num_generated=few,
                limit_s=limit_s,
                on_prompt=advance,
            )

    return setting.parts.get("reference", list[IdentityCheck], compute)


def baselines(setting: Setting) -> list[BaselineCandidate]:
    """Ways to decode without a drafter, timed on the first prompt."""
    return setting.parts.get(
        "baselines",
        list[BaselineCandidate],
        lambda: find_baseline(
            setting.target,
            setting.reference,
            [setting.first_prompts[0].token_ids],
            max_new_tokens=setting.config.max_new_tokens,
        ),
    )


def compared_policies(
    setting: Setting, name: str, suite: str, answers: list[Answer], measured: CostResult, best: int
) -> list[PolicyResult]:
    """Draft-length policies of a drafter on one suite."""
    drafter, longest = setting.drafters[name], setting.config.max_draft_tokens

    def compute() -> list[PolicyResult]:
        with setting.stage(f"policies of {name}, {suite}", len(answers)) as advance:
            drafts = []
            for answer in answers:
                drafts.append(record(setting.states, drafter, answer, max_draft_tokens=longest))
                advance(1)
        return compare_policies(
            answers,
            drafts,
            policies(measured.costs, best),
            measured.costs,
            drafter=name,
            suite=suite,
        )

    return setting.parts.get(f"policies {name} {suite}", list[PolicyResult], compute)


def former_failures(setting: Setting, failures: Sequence[WeakPrefix]) -> list[FormerFailures]:
    """Every drafter at places where an earlier one failed."""

    def compute() -> list[FormerFailures]:
        found = []
        title, drafters = "places where an earlier drafter failed", setting.drafters
        with setting.stage(title, len(drafters)) as advance:
            for name, drafter in drafters.items():
                found.append(
                    asked_again(setting.states, drafter, failures, name=name, **setting.bootstrap)
                )
                advance(1)
        return found

    return setting.parts.get("former failures", list[FormerFailures], compute)


def rival(setting: Setting, facts: DrafterFacts, num_draft_tokens: int) -> list[RivalResult]:
    """transformers with the same drafter on the first suite; empty where it cannot run it."""
    drafter, suite, config = setting.drafters[facts.name], setting.first_suite, setting.config

    def compute() -> list[RivalResult]:
        with setting.stage(f"{facts.name} in transformers", 1) as advance:
            found = measure_rival(
                setting.target,
                drafter,
                facts,
                spread(setting.first_prompts, config.rival_prompts),
                suite=suite,
                num_draft_tokens=num_draft_tokens,
                max_new_tokens=config.max_new_tokens,
                reference=setting.reference,
            )
            advance(1)
        return [] if found is None else [found]

    return setting.parts.get(f"rival {facts.name}", list[RivalResult], compute)


def sweeps(
    setting: Setting, name: str, num_draft_tokens: list[int], lengths: list[ReplayedLength]
) -> list[SweepPoint]:
    """One drafter by batch size and by context length, as far as the settings ask for it."""
    config, drafter = setting.config, setting.drafters[name]

    def compute() -> list[SweepPoint]:
        total = len(config.batch_sizes) + len(config.context_lengths)
        with setting.stage(f"batch sizes and context lengths of {name}", total) as advance:
            points = batch_sweep(
                setting.target,
                drafter,
                setting.first_prompts,
                name=name,
                batch_sizes=config.batch_sizes,
                num_draft_tokens=num_draft_tokens,
                max_new_tokens=config.max_new_tokens,
            )
            points += context_sweep(
                setting.target,
                drafter,
                setting.first_prompts[0].token_ids,
                lengths,
                name=name,
                context_lengths=config.context_lengths,
                max_draft_tokens=config.max_draft_tokens,
            )
            advance(total)
        return points

    return setting.parts.get(f"sweeps {name}", list[SweepPoint], compute)


def costs(setting: Setting, pass_s: list[float], plain_token_s: float | None) -> list[CostResult]:
    """Costs of a round with each drafter; `plain_token_s` as in `measure_costs`."""

    def compute() -> list[CostResult]:
        with setting.stage("costs of a round", 1) as advance:
            found = measure_costs(
                setting.target,
                setting.drafters,
                _cost_prompts(setting),
                max_draft_tokens=setting.config.max_draft_tokens,
                pass_s=pass_s,
                plain_token_s=plain_token_s,
            )
            advance(1)
        return found

    measured = setting.parts.get("costs", list[CostResult], compute)
    model = setting.target.model
    speed = setting.parts.get("bandwidth", float, lambda: memory_bandwidth(model.device))
    return [
        replace(
            one,
            target_weights=pass_weights(model, speed),
            draft_weights=draft_weights(setting.drafters[one.drafter], speed),
        )
        for one in measured
    ]


def _cost_prompts(setting: Setting) -> TokenLists:
    """A few prompts, of every suite in turn."""
    suites = [spread(prompts, NUM_PROMPTS) for prompts in setting.suites.values()]
    turns = ((suites[i % len(suites)], i // len(suites)) for i in range(NUM_PROMPTS))
    return [prompts[turn % len(prompts)].token_ids for prompts, turn in turns]


def scores(
    setting: Setting, name: str, suite: str, answers: list[Answer]
) -> list[AnswerScores] | None:
    """Both models' distributions along the answers; None for drafters that have none."""
    drafter = setting.drafters[name]
    if not isinstance(drafter, ScoredDrafter):
        return None

    def compute() -> list[AnswerScores]:
        found = []
        with setting.stage(f"overlap of {name}, {suite}", len(answers)) as advance:
            for answer in answers:
                found.append(score_answer(setting.states, drafter, answer))
                advance(1)
        return found

    return setting.parts.get(f"scores {name} {suite}", list[AnswerScores], compute)


def replayed(
    setting: Setting,
    greedy: AcceptanceResult,
    answers: list[Answer],
    proposed: list[Proposals],
    scored: list[AnswerScores] | None,
) -> ReplayResult:
    """Acceptance of the drafter of `greedy` at every draft length."""
    return replay(
        answers,
        proposed,
        decoded=greedy,
        max_draft_tokens=setting.config.max_draft_tokens,
        overlaps=None if scored is None else [s.overlap for s in scored],
        **setting.bootstrap,
    )
