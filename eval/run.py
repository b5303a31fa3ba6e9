"""`evaluate`: one target, drafters side by side, prompts -> results and report of one folder.

Order: how fast is a pass (and so how long will this take), the target's own greedy texts, the same
from transformers, then for every drafter costs, acceptance and replay, then the timing of all of
them interleaved, the conclusions, and a look at where the first drafter fails. Every finished part
is kept on disk, so that an interrupted evaluation continues where it stopped.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from eval.acceptance import acceptance_result, measure_acceptance
from eval.budget import TIMED_SHARE, Amounts, describe, estimate, fit_prompts, total
from eval.conclusions import conclude
from eval.config import EvaluationConfig
from eval.costs import measure_costs, time_passes
from eval.exactness import Texts, compare, self_draft_acceptance
from eval.identity import drafter_facts, machine_facts, suite_facts, target_facts
from eval.inspection import AnswerScores, score_answer, trace_answers, weak_prefixes
from eval.parts import Parts, fingerprint_of
from eval.prediction import decoded_lengths, speedups_by_length
from eval.progress import Stage, terminal_stage
from eval.reference import (
    Reference,
    find_baseline,
    noise_tolerance,
    own_decoder,
    plain_decoders,
    reference_check,
)
from eval.replay import Answer, is_replayable, proposals, replay
from eval.report import write_report, write_results
from eval.results import (
    SCHEMA_VERSION,
    AcceptanceResult,
    BaselineCandidate,
    CostResult,
    Flag,
    IdentityCheck,
    ReplayedLength,
    ReplayResult,
    Results,
)
from eval.suites import EvalPrompt, as_prompts, fitting, spread, write_prompts
from eval.timing import SuiteTiming, time_suite
from eval.trace import Trace, WeakPrefix
from specdec_runtime.draft import Drafter
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.target import Target

log = logging.getLogger(__name__)

PROMPTS_FILE = "prompts.jsonl"  # beside results.json: what the evaluation can be repeated with
SELF_DRAFT_TOKENS = 32
TokenLists = list[list[int]]


def evaluate(
    target: Target,
    drafters: Mapping[str, Drafter | None],
    prompts: Mapping[str, Sequence[EvalPrompt | Sequence[int]]],
    config: EvaluationConfig,
    *,
    folder: Path | None = None,
    drafter_folders: Mapping[str, str] | None = None,
    notes: Sequence[Flag] = (),
    stage: Stage = terminal_stage,
) -> Results:
    """Measure drafters against plain decoding of one target.

    Args:
        drafters: by the name the report uses; the first is what the page is about. None (plain
            decoding) is always measured and needs no entry.
        prompts: by suite; the first suite decides the verdict that the page opens with.
        folder: where results.json, report.html, ... go; parts of an interrupted evaluation of the
            same inputs are picked up there. None writes nothing.
        drafter_folders: where drafters were loaded from, for the record.
        notes: what the caller has found already, shown with the results.
        stage: progress display of each part.

    Raises:
        ValueError: no drafter, no prompts, or prompts that do not fit the target.
    """
    used = {name: drafter for name, drafter in drafters.items() if drafter is not None}
    if not used:
        raise ValueError(
            "nothing to evaluate: every drafter given is 'none', expected at least one other"
        )
    suites = {name: as_prompts(name, given) for name, given in prompts.items()}
    if not suites or not all(suites.values()):
        raise ValueError("no prompts to evaluate on: give at least one suite with a prompt in it")
    evaluation = _Evaluation(target, used, suites, config, folder, drafter_folders or {}, stage)
    evaluation.notes += notes
    return evaluation.run()


class _Evaluation:
    """One `evaluate` call under way; `results` grows part by part."""

    def __init__(
        self,
        target: Target,
        drafters: dict[str, Drafter],
        suites: Mapping[str, list[EvalPrompt]],
        config: EvaluationConfig,
        folder: Path | None,
        drafter_folders: Mapping[str, str],
        stage: Stage,
    ) -> None:
        self.started = time.monotonic()
        self.target, self.drafters, self.config = target, drafters, config
        self.folder, self.stage = folder, stage
        self.reference = Reference(target)
        self.suites, self.too_long = self.fitting_prompts(suites)
        self.results = Results(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            target=target_facts(target),
            machine=machine_facts(),
            settings=asdict(config),
            drafters=[
                drafter_facts(name, drafter, drafter_folders.get(name))
                for name, drafter in drafters.items()
            ],
        )
        facts = (SCHEMA_VERSION, self.results.target, self.results.drafters, asdict(config))
        ids = {name: [p.token_ids for p in kept] for name, kept in self.suites.items()}
        self.parts = Parts(folder, fingerprint_of(*facts, ids))
        self.texts: dict[str, TokenLists] = {}  # the target's own greedy outputs, by suite
        self.checks: dict[str, list[IdentityCheck]] = {name: [] for name in drafters}
        self.lengths: dict[tuple[str, str], list[ReplayedLength]] = {}
        self.scores: dict[tuple[str, str], list[AnswerScores]] = {}
        self.notes: list[Flag] = []

    def run(self) -> Results:
        self.plan()
        for suite in self.suites:
            self.decode_plainly(suite)
        self.measure_noise()
        self.compare_with_reference()
        self.choose_baseline()
        for name in self.drafters:
            self.measure_drafter(name)
            self.save()
        for index in range(len(self.suites)):
            self.time_suite(index)
            self.save()
        conclude(
            self.results,
            self.target,
            self.checks,
            self.lengths,
            self_draft_acceptance=self.self_draft,
            notes=self.notes,
        )
        self.finish()
        return self.results

    def fitting_prompts(
        self, suites: Mapping[str, list[EvalPrompt]]
    ) -> tuple[dict[str, list[EvalPrompt]], dict[str, int]]:
        """Evenly chosen prompts that leave room for an answer; how many were too long."""
        kept, too_long = {}, {}
        for name, prompts in suites.items():
            fit = fitting(
                prompts,
                max_new_tokens=self.config.max_new_tokens,
                max_positions=self.target.model.max_positions,
                suite=name,
            )
            too_long[name] = len(prompts) - len(fit)
            kept[name] = spread(fit, self.config.num_prompts)
        return kept, too_long

    def plan(self) -> None:
        """Measure a pass, choose how many prompts fit the time, say how long it will take."""
        config, first = self.config, self.first_prompts()[0]
        self.pass_s = self.parts.get(
            "passes",
            list[float],
            lambda: time_passes(
                self.target.model, first.token_ids, max_draft_tokens=config.max_draft_tokens
            ),
        )
        prompts = [p for suite in self.suites.values() for p in suite]
        amounts = Amounts(
            num_suites=len(self.suites),
            num_prompts=max(map(len, self.suites.values())),
            prompt_tokens=sum(len(p.token_ids) for p in prompts) / len(prompts),
            num_drafters=len(self.drafters),
            num_temperatures=1 if config.sampling_temperature is None else 2,
        )
        fitted = fit_prompts(self.pass_s, amounts, config)
        if fitted != amounts:
            message = (
                f"{fitted.num_prompts} instead of {amounts.num_prompts} prompts a suite, to stay "
                f"within evaluation.time_limit_s={config.time_limit_s:.0f}"
            )
            self.notes.append(Flag("note", "fewer_prompts", message))
            self.suites = {k: spread(v, fitted.num_prompts) for k, v in self.suites.items()}
        parts = estimate(self.pass_s, fitted, config)
        least = TIMED_SHARE * config.time_limit_s
        self.timing_limit_s = max(config.time_limit_s - total(parts), least)
        log.info("evaluation: %s, timing up to %.0f s", describe(parts), self.timing_limit_s)
        self.results.suites = [
            suite_facts(name, kept, self.too_long[name]) for name, kept in self.suites.items()
        ]
        if self.folder is not None:
            write_prompts(self.folder / PROMPTS_FILE, self.suites)

    def decode_plainly(self, suite: str) -> None:
        """The target's own greedy texts."""
        prompts = self.suites[suite]

        def compute() -> TokenLists:
            with self.stage(f"plain greedy texts, {suite}", len(prompts)) as advance:
                return measure_acceptance(
                    self.target,
                    None,
                    [p.token_ids for p in prompts],
                    num_draft_tokens=0,
                    max_new_tokens=self.config.max_new_tokens,
                    batch_size=self.config.batch_size,
                    on_prompts=advance,
                ).token_ids

        self.texts[suite] = self.parts.get(f"plain {suite}", TokenLists, compute)

    def measure_noise(self) -> None:
        """What rounding can flip here, and whether the target accepts its own drafts."""
        suite, prompts = next(iter(self.suites.items()))
        sample = [*prompts[0].token_ids, *self.texts[suite][0]]
        width = self.config.num_draft_tokens + 1
        self.tolerance = self.parts.get(
            "tolerance", float, lambda: noise_tolerance(self.target, sample, width=width)
        )
        self.self_draft = self.parts.get(
            "self draft",
            float,
            lambda: self_draft_acceptance(
                self.target,
                [p.token_ids for p in spread(prompts, 2)],
                max_new_tokens=min(SELF_DRAFT_TOKENS, self.config.max_new_tokens),
            ),
        )

    def compare_with_reference(self) -> None:
        """Plain decoding against transformers' generate, on a few prompts; counts for everyone."""
        suite, prompts = next(iter(self.suites.items()))
        few = spread(prompts, self.config.reference_prompts)
        if not few or not self.reference.is_available:
            message = "texts were not compared with transformers' generate"
            self.notes.append(Flag("note", "no_reference", message))
            return
        texts = dict(zip((p.id for p in prompts), self.texts[suite], strict=True))

        def compute() -> IdentityCheck:
            with self.stage("transformers' own greedy texts", len(few)) as advance:
                return reference_check(
                    self.target,
                    self.reference,
                    few,
                    [texts[p.id] for p in few],
                    max_new_tokens=self.config.max_new_tokens,
                    on_prompt=advance,
                )

        check = self.parts.get("reference", IdentityCheck, compute)
        for checks in self.checks.values():
            checks.append(check)

    def choose_baseline(self) -> None:
        """The fastest plain decoding of the target; everything is compared with that one."""
        prompts = [p.token_ids for p in self.first_prompts()[:1]]
        self.results.baselines = self.parts.get(
            "baselines",
            list[BaselineCandidate],
            lambda: find_baseline(
                self.target, self.reference, prompts, max_new_tokens=self.config.max_new_tokens
            ),
        )
        self.baseline = next(b for b in self.results.baselines if b.used)
        if self.baseline.name == own_decoder(self.target):
            self.reference.release()

    def measure_drafter(self, name: str) -> None:
        """Costs, acceptance at both temperatures, and replay."""
        drafter, own = self.drafters[name], own_decoder(self.target)
        plain_token_s = None if self.baseline.name == own else 1 / self.baseline.tokens_per_s
        costs = self.parts.get(
            f"costs {name}",
            CostResult,
            lambda: measure_costs(
                self.target,
                drafter,
                self.first_prompts()[0].token_ids,
                name=name,
                max_draft_tokens=self.config.max_draft_tokens,
                pass_s=self.pass_s,
                plain_token_s=plain_token_s,
            ),
        )
        self.results.costs.append(costs)
        for suite in self.suites:
            greedy = self.measure_acceptance(name, suite, 0.0)
            found = [counts.token_ids for counts in greedy.prompts]
            self.check_texts(name, suite, self.suites[suite], found, greedy.num_draft_tokens)
            if self.config.sampling_temperature is not None:
                self.measure_acceptance(name, suite, self.config.sampling_temperature)
            if is_replayable(drafter):
                self.lengths[name, suite] = self.replay(name, suite, greedy).lengths
            else:
                self.lengths[name, suite] = decoded_lengths(greedy)

    def measure_acceptance(self, name: str, suite: str, temperature: float) -> AcceptanceResult:
        """One row of the acceptance tables."""
        config, drafter, prompts = self.config, self.drafters[name], self.suites[suite]
        length = config.num_draft_tokens
        if temperature == 0 and not is_replayable(drafter):
            length = config.max_draft_tokens  # shorter ones are read off this decode

        def compute() -> AcceptanceResult:
            title = f"acceptance of {name}, {suite}, temperature {temperature:g}"
            with self.stage(title, len(prompts)) as advance:
                measured = measure_acceptance(
                    self.target,
                    drafter,
                    [p.token_ids for p in prompts],
                    num_draft_tokens=length,
                    max_new_tokens=config.max_new_tokens,
                    temperature=temperature,
                    seed=config.seed,
                    batch_size=config.batch_size,
                    on_prompts=advance,
                )
            return acceptance_result(
                measured,
                prompts,
                drafter=name,
                suite=suite,
                temperature=temperature,
                num_draft_tokens=length,
                num_resamples=config.num_resamples,
                seed=config.seed,
            )

        part = f"acceptance {name} {suite} {temperature:g}"
        result = self.parts.get(part, AcceptanceResult, compute)
        self.results.acceptance.append(result)
        return result

    def replay(self, name: str, suite: str, greedy: AcceptanceResult) -> ReplayResult:
        """Proposals and distributions along the target's texts."""
        drafter, answers, config = self.drafters[name], self.answers(suite), self.config
        if isinstance(drafter, CausalLMDrafter):
            self.scores[name, suite] = self.parts.get(
                f"scores {name} {suite}",
                list[AnswerScores],
                lambda: self.score(name, suite, drafter),
            )
        scores = self.scores.get((name, suite))

        def compute() -> ReplayResult:
            return replay(
                answers,
                [
                    proposals(self.target, drafter, a, max_draft_tokens=config.max_draft_tokens)
                    for a in answers
                ],
                decoded=greedy,
                max_draft_tokens=config.max_draft_tokens,
                overlaps=None if scores is None else [s.overlap for s in scores],
                num_resamples=config.num_resamples,
                seed=config.seed,
            )

        result = self.parts.get(f"replay {name} {suite}", ReplayResult, compute)
        self.results.replay.append(result)
        return result

    def score(self, name: str, suite: str, drafter: CausalLMDrafter) -> list[AnswerScores]:
        answers, scores = self.answers(suite), []
        with self.stage(f"overlap of {name}, {suite}", len(answers)) as advance:
            for answer in answers:
                scores.append(score_answer(self.target, drafter, answer))
                advance(1)
        return scores

    def check_texts(
        self,
        name: str,
        suite: str,
        prompts: Sequence[EvalPrompt],
        found: TokenLists,
        num_draft_tokens: int,
    ) -> None:
        """Speculative against plain texts of some prompts of a suite."""
        expected = dict(zip((p.id for p in self.suites[suite]), self.texts[suite], strict=True))
        title = f"speculative against plain decoding, {suite}, {num_draft_tokens} drafted"
        texts = Texts(title, [expected[p.id] for p in prompts], found)
        check = compare(self.target, prompts, texts, tolerance=self.tolerance)
        self.checks[name].append(check)

    def time_suite(self, index: int) -> None:
        """Plain decoding and every drafter at its recommended length; its texts are checked too."""
        suite, prompts = list(self.suites.items())[index]
        few = spread(prompts, self.config.speed_prompts)
        timing = self.parts.get(
            f"speed {suite}",
            SuiteTiming,
            lambda: time_suite(
                self.target,
                self.drafters,
                {name: self.lengths_to_time(name, suite) for name in self.drafters},
                few,
                suite=suite,
                config=self.config,
                plain=plain_decoders(self.target, self.reference)[self.baseline.name],
                limit_s=self.timing_limit_s / len(self.suites),
                stage=self.stage,
            ),
        )
        self.results.speed += timing.speeds
        self.notes += timing.flags
        by_id = {p.id: p for p in prompts}
        for timed in timing.texts:
            kept = [by_id[i] for i in timed.prompt_ids]
            self.check_texts(timed.drafter, suite, kept, timed.token_ids, timed.num_draft_tokens)

    def lengths_to_time(self, name: str, suite: str) -> list[int]:
        """The best predicted length of a drafter, then those that the settings ask for."""
        costs = next(c for c in self.results.costs if c.drafter == name).costs
        lengths = {one.num_draft_tokens: one for one in self.lengths[name, suite] if one.num_rounds}
        speedups = speedups_by_length(lengths, costs)
        best = max(speedups, key=lambda k: speedups[k], default=self.config.num_draft_tokens)
        also = self.config.also_time if name == next(iter(self.drafters)) else []
        return [best, *(k for k in also if k != best)]

    def finish(self) -> None:
        """Traces and weak places of the first drafter, then the report."""
        if self.folder is None:
            self.complete()
            return
        name = next(iter(self.drafters))
        traces: list[Trace] = []
        weak: list[WeakPrefix] = []
        for index, (suite, prompts) in enumerate(self.suites.items()):
            scores = self.scores.get((name, suite))
            if index == 0:
                traces = trace_answers(
                    self.target,
                    self.drafters[name],
                    prompts[: self.config.trace_prompts],
                    scores,
                    num_draft_tokens=self.lengths_to_time(name, suite)[0],
                    max_new_tokens=self.config.max_new_tokens,
                    drafter_name=name,
                    suite=suite,
                )
            if scores is not None:
                weak += weak_prefixes(
                    self.target, prompts, self.answers(suite), scores, drafter=name, suite=suite
                )
        self.complete()
        write_report(self.folder, self.results, traces, weak)
        self.parts.forget()

    def complete(self) -> None:
        self.results.complete = True
        self.results.seconds = time.monotonic() - self.started

    def save(self) -> None:
        """What there is so far, for whoever looks or in case it is stopped."""
        self.results.seconds = time.monotonic() - self.started
        if self.folder is not None:
            write_results(self.folder, self.results)

    def first_prompts(self) -> list[EvalPrompt]:
        return next(iter(self.suites.values()))

    def answers(self, suite: str) -> list[Answer]:
        return [
            Answer(prompt.token_ids, text, self.config.max_new_tokens)
            for prompt, text in zip(self.suites[suite], self.texts[suite], strict=True)
        ]
