"""`evaluate`: one target, drafters side by side, prompts -> results and report of one folder.

Order: how fast is a pass, the target's own greedy texts, the same from transformers, the costs of a
round with each drafter, then for every drafter acceptance and replay, then the timing of all of them
interleaved, the conclusions, and where the first drafter fails. Finished parts are kept, so that an
interrupted one continues.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from eval import measured_acceptance, measurements
from eval.acceptance import MeasuredAcceptance, by_category
from eval.budget import (
    FINISHING_PASSES,
    REFERENCE_SHARE,
    TIMED_SHARE,
    Amounts,
    describe,
    estimate,
    fit_prompts,
    total,
)
from eval.conclusions import conclude
from eval.config import EvaluationConfig
from eval.cost_model import length_to_use
from eval.exactness import AGAINST_PLAIN, Texts, compare
from eval.facts import Flag
from eval.groups import BreakdownResult
from eval.identity import drafter_facts, machine_facts, peak_memory, suite_facts, target_facts
from eval.inspection import AnswerScores, trace_answers, weak_prefixes
from eval.measured_acceptance import Measured, by_place, greedy_acceptance, sampled_acceptance
from eval.measurements import Setting, TokenLists
from eval.parts import Parts, fingerprint_of
from eval.prediction import speedups_by_length
from eval.progress import Stage, terminal_stage
from eval.reference import Reference, own_decoder, plain_decoders
from eval.report import write_report, write_results
from eval.results import SCHEMA_VERSION, AcceptanceResult, IdentityCheck, ReplayedLength, Results
from eval.sampled_replay import is_recordable
from eval.suites import EvalPrompt, as_prompts, fitting, spread, write_prompts
from eval.target_texts import Answer, TargetStates
from eval.timing import TimedSuite, remarks, time_suites
from eval.trace import Trace, WeakPrefix
from specdec_runtime.draft import Drafter
from specdec_runtime.target import Target

log = logging.getLogger(__name__)

PROMPTS_FILE = "prompts.jsonl"  # beside results.json: what the evaluation can be repeated with


def evaluate(
    target: Target,
    drafters: Mapping[str, Drafter | None],
    prompts: Mapping[str, Sequence[EvalPrompt | Sequence[int]]],
    config: EvaluationConfig,
    *,
    folder: Path | None = None,
    drafter_folders: Mapping[str, str] | None = None,
    failures: Sequence[WeakPrefix] = (),
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
        failures: places where an earlier drafter failed, to be asked again.
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
    fitted = {name: _fitting(target, name, given, config) for name, given in suites.items()}
    kept = {name: spread(given, config.num_prompts) for name, given in fitted.items()}
    results = Results(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        target=target_facts(target),
        machine=machine_facts(),
        settings=asdict(config),
        drafters=[
            drafter_facts(name, drafter, (drafter_folders or {}).get(name))
            for name, drafter in used.items()
        ],
    )
    ids = {name: [p.token_ids for p in given] for name, given in kept.items()}
    facts = (SCHEMA_VERSION, results.target, results.drafters, results.settings, ids)
    parts = Parts(folder, fingerprint_of(*facts))
    states = TargetStates(target, [k for one in used.values() for k in one.hidden_layers])
    setting = Setting(target, used, kept, config, parts, stage, Reference(target), states)
    too_long = {name: len(suites[name]) - len(fitted[name]) for name in suites}
    evaluation = _Evaluation(setting, results, folder, too_long)
    evaluation.notes, evaluation.failures = list(notes), failures
    return evaluation.run()


def _fitting(
    target: Target, suite: str, prompts: Sequence[EvalPrompt], config: EvaluationConfig
) -> list[EvalPrompt]:
    """The prompts that leave room for an answer."""
    return fitting(
        prompts,
        max_new_tokens=config.max_new_tokens,
        max_positions=target.model.max_positions,
        suite=suite,
    )


class _Evaluation:
    """One `evaluate` call under way; `results` grows part by part."""

    def __init__(
        self, setting: Setting, results: Results, folder: Path | None, too_long: dict[str, int]
    ) -> None:
        self.started = time.monotonic()
        self.setting, self.results = setting, results
        self.folder, self.too_long = folder, too_long
        self.texts: dict[str, MeasuredAcceptance] = {}  # the target's own, greedy, by suite
        self.checks: dict[str, list[IdentityCheck]] = {name: [] for name in setting.drafters}
        self.lengths: dict[tuple[str, str], list[ReplayedLength]] = {}
        self.scores: dict[tuple[str, str], list[AnswerScores] | None] = {}
        self.notes: list[Flag] = []
        self.failures: Sequence[WeakPrefix] = ()

    def run(self) -> Results:
        self.plan()
        for suite in self.setting.suites:
            self.texts[suite] = measured_acceptance.plain(self.setting, suite, 0.0)
        first_text = self.texts[self.setting.first_suite].token_ids[0]
        self.tolerance = measurements.tolerance(self.setting, first_text)
        self_draft = measurements.self_acceptance(self.setting)
        self.results.sampling = measurements.sampling(self.setting)
        self.compare_with_transformers()
        self.choose_baseline()
        plain_token_s = None if self.own_baseline else 1 / self.baseline.tokens_per_s
        self.results.costs = measurements.costs(self.setting, self.pass_s, plain_token_s)
        for name in self.setting.drafters:
            self.measure_drafter(name)
            self.save()
        self.look_further()
        self.time()
        self.save()
        conclude(
            self.results,
            self.setting.target,
            self.checks,
            self.lengths,
            self_draft_acceptance=self_draft,
            notes=self.notes,
        )
        self.finish()
        return self.results

    def plan(self) -> None:
        """Measure a pass, choose how many prompts fit the time, say how long it will take."""
        setting, config = self.setting, self.setting.config
        self.pass_s = measurements.passes(setting)
        prompts = [p for suite in setting.suites.values() for p in suite]
        amounts = Amounts(
            num_suites=len(setting.suites),
            num_prompts=max(map(len, setting.suites.values())),
            prompt_tokens=sum(len(p.token_ids) for p in prompts) / len(prompts),
            num_drafters=len(setting.drafters),
            num_recorded=sum(map(is_recordable, setting.drafters.values())),
            num_followed=sum(bool(one.hidden_layers) for one in setting.drafters.values()),
            num_temperatures=1 if config.sampling_temperature is None else 2,
        )
        a_pass = measurements.pass_time(setting, self.pass_s[0])
        fitted = fit_prompts(a_pass, amounts, config)
        if fitted != amounts:
            message = (
                f"{fitted.num_prompts} instead of {amounts.num_prompts} prompts a suite, to stay "
                f"within evaluation.time_limit_s={config.time_limit_s:.0f}"
            )
            self.note("fewer_prompts", message)
            for name, kept in setting.suites.items():
                setting.suites[name] = kept[: fitted.num_prompts]
        parts = estimate(a_pass, fitted, config)
        left = max(config.time_limit_s - total(parts), TIMED_SHARE * config.time_limit_s)
        log.info("evaluation: %s, timing the rest, about %.0f s", describe(parts), left)
        self.results.suites = [
            suite_facts(name, kept, self.too_long[name]) for name, kept in setting.suites.items()
        ]
        if self.folder is not None:
            write_prompts(self.folder / PROMPTS_FILE, setting.suites)

    def compare_with_transformers(self) -> None:
        """Plain decoding against transformers' own; what is found counts for every drafter."""
        setting = self.setting
        if not setting.config.reference_prompts or not setting.reference.is_available:
            self.note("no_reference", "texts were not compared with transformers' own decoding")
            return
        limit_s = REFERENCE_SHARE * setting.config.time_limit_s
        texts = self.texts[setting.first_suite].token_ids
        found = measurements.transformers_checks(setting, texts, limit_s=limit_s)
        for checks in self.checks.values():
            checks += found

    def choose_baseline(self) -> None:
        """The fastest plain decoding of the target; everything is compared with that one."""
        self.results.baselines = measurements.baselines(self.setting)
        self.baseline = next(b for b in self.results.baselines if b.used)
        self.own_baseline = self.baseline.name == own_decoder(self.setting.target)
        if self.own_baseline:
            self.setting.reference.release()

    def measure_drafter(self, name: str) -> None:
        """Acceptance at both temperatures, and replay."""
        setting = self.setting
        for suite in setting.suites:
            greedy, proposed = greedy_acceptance(setting, name, suite, self.texts[suite])
            self.check_decoded(greedy.record)
            answers = self.answers(suite)
            scored = measurements.scores(setting, name, suite, answers)
            replayed = measurements.replayed(setting, greedy.record, answers, proposed, scored)
            self.results.replay.append(replayed)
            self.scores[name, suite], self.lengths[name, suite] = scored, replayed.lengths
            self.add_acceptance(greedy, by_place(setting, greedy, proposed, scored))
            self.sample(name, suite)

    def sample(self, name: str, suite: str) -> None:
        """Acceptance at the sampling temperature, checked by decoding on the first suite."""
        temperature = self.setting.config.sampling_temperature
        if temperature is None:
            return
        check = suite == self.setting.first_suite
        found = sampled_acceptance(self.setting, name, suite, temperature, check=check)
        self.add_acceptance(found, by_place(self.setting, found))
        self.results.sampled_replay += [] if found.sampled is None else [found.sampled]

    def add_acceptance(self, found: Measured, places: list[BreakdownResult]) -> None:
        """A drafter on a suite, on each category of it, and on each kind of place of its texts."""
        record, prompts = found.record, self.setting.suites[found.record.suite]
        self.results.acceptance.append(record)
        self.results.categories += by_category(record, prompts, **self.setting.bootstrap)
        self.results.breakdown += places

    def check_decoded(self, greedy: AcceptanceResult) -> None:
        """The texts of the prompts that were decoded with a drafter."""
        by_id = {p.id: p for p in self.setting.suites[greedy.suite]}
        decoded = [counts for counts in greedy.prompts if counts.decoded]
        self.check_texts(
            greedy.drafter,
            greedy.suite,
            [by_id[counts.prompt_id] for counts in decoded],
            [counts.token_ids for counts in decoded],
            greedy.num_draft_tokens,
        )

    def check_texts(
        self,
        name: str,
        suite: str,
        prompts: Sequence[EvalPrompt],
        found: TokenLists,
        num_draft_tokens: int | str,
    ) -> None:
        """Speculative against plain texts of some prompts of a suite."""
        ids = [p.id for p in self.setting.suites[suite]]
        expected = dict(zip(ids, self.texts[suite].token_ids, strict=True))
        title = f"{AGAINST_PLAIN}, {suite}, {num_draft_tokens} drafted"
        texts = Texts(title, [expected[p.id] for p in prompts], found)
        check = compare(self.setting.target, prompts, texts, tolerance=self.tolerance)
        self.checks[name].append(check)

    def time(self) -> None:
        """Plain decoding and every drafter at its recommended length; their texts are checked too."""
        setting, config = self.setting, self.setting.config
        decoders = plain_decoders(setting.target, setting.reference, name=self.baseline.name)
        wanted = {
            suite: TimedSuite(
                prompts=prompts[: config.speed_prompts],
                lengths={name: self.settings_to_time(name, suite) for name in setting.drafters},
            )
            for suite, prompts in setting.suites.items()
        }
        timings = time_suites(
            setting.target,
            setting.drafters,
            wanted,
            config=config,
            plain=decoders[self.baseline.name],
            limit_s=self.time_left(),
            parts=setting.parts,
            stage=setting.stage,
        )
        self.notes += remarks(timings, wanted)
        for suite, timing in timings.items():
            self.results.speed += timing.speeds
            by_id = {p.id: p for p in setting.suites[suite]}
            for timed in timing.texts:
                kept = [by_id[i] for i in timed.prompt_ids]
                self.check_texts(
                    timed.drafter, suite, kept, timed.token_ids, timed.num_draft_tokens
                )

    def time_left(self) -> float:
        """Seconds of the limit that the timing may take, which is the last thing measured."""
        limit_s = self.setting.config.time_limit_s
        finishing = FINISHING_PASSES * self.pass_s[0]
        left = limit_s - (time.monotonic() - self.started) - finishing
        return max(left, TIMED_SHARE * limit_s)

    def look_further(self) -> None:
        """What is measured on request: the same drafters in transformers, batches, contexts."""
        setting, config = self.setting, self.setting.config
        if self.failures:
            self.results.former_failures += measurements.former_failures(setting, self.failures)
        first = next(iter(setting.drafters))
        if config.policies:
            costs = next(c for c in self.results.costs if c.drafter == first)
            for suite in setting.suites:
                best = self.lengths_to_time(first, suite)[0]
                self.results.policies += measurements.compared_policies(
                    setting, first, suite, self.answers(suite), costs, best
                )
        if config.rival_prompts:
            for facts in self.results.drafters:
                length = self.lengths_to_time(facts.name, setting.first_suite)[0]
                self.results.rivals += measurements.rival(setting, facts, length)
            if self.own_baseline:
                setting.reference.release()
        if config.batch_sizes or config.context_lengths:
            self.results.sweeps += measurements.sweeps(
                setting,
                first,
                self.lengths_to_time(first, setting.first_suite),
                self.lengths[first, setting.first_suite],
            )

    def settings_to_time(self, name: str, suite: str) -> list[int | str]:
        """Draft lengths, and "auto" of the first drafter if that is asked for."""
        is_first = name == next(iter(self.setting.drafters))
        auto = ["auto"] if self.setting.config.time_auto and is_first else []
        return [*self.lengths_to_time(name, suite), *auto]

    def lengths_to_time(self, name: str, suite: str) -> list[int]:
        """The length to use a drafter with, then those that the settings ask for."""
        config = self.setting.config
        costs = next(c for c in self.results.costs if c.drafter == name).costs
        lengths = {one.num_draft_tokens: one for one in self.lengths[name, suite] if one.num_rounds}
        speedups = speedups_by_length(lengths, costs)
        best = length_to_use(speedups) if speedups else config.num_draft_tokens
        also = config.also_time if name == next(iter(self.setting.drafters)) else []
        return [best, *(k for k in also if k != best)]

    def finish(self) -> None:
        """Traces and weak places of the first drafter, then the report."""
        setting, name = self.setting, next(iter(self.setting.drafters))
        traces: list[Trace] = []
        weak: list[WeakPrefix] = []
        if self.folder is not None:
            suite = setting.first_suite
            traces = trace_answers(
                setting.target,
                setting.drafters[name],
                setting.first_prompts[: setting.config.trace_prompts],
                self.scores.get((name, suite)),
                num_draft_tokens=self.lengths_to_time(name, suite)[0],
                max_new_tokens=setting.config.max_new_tokens,
                drafter_name=name,
                suite=suite,
            )
        for suite, prompts in setting.suites.items():
            scored, answers = self.scores.get((name, suite)), self.answers(suite)
            if scored is not None:
                weak += weak_prefixes(
                    setting.target, prompts, answers, scored, drafter=name, suite=suite
                )
        self.results.machine["peak memory"] = peak_memory()
        self.results.complete = True
        self.results.seconds = time.monotonic() - self.started
        if self.folder is not None:
            write_report(self.folder, self.results, traces, weak)
        setting.parts.forget()

    def save(self) -> None:
        """What there is so far, for whoever looks or in case it is stopped."""
        self.results.seconds = time.monotonic() - self.started
        if self.folder is not None:
            write_results(self.folder, self.results)

    def note(self, code: str, message: str) -> None:
        self.notes.append(Flag("note", code, message))

    def answers(self, suite: str) -> list[Answer]:
        return measured_acceptance.answers_of(self.setting, suite, self.texts[suite])
