"""The tables of an evaluation, once, for report.html, report.md and the terminal."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from eval.intervals import Interval
from eval.results import AcceptanceResult, IdentityCheck, Results, SpeedResult
from eval.sampling_check import SMALLEST_P_VALUE


@dataclass(frozen=True)
class Cell:
    """A value as text; `range` is its interval, shown smaller. wide: may wrap over lines."""

    text: str
    range: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """Columns and rows; `text_columns` are aligned left; rows in `main_rows` are set in bold."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""
    text_columns: frozenset[int] = frozenset({0})
    main_rows: frozenset[int] = field(default_factory=frozenset)


def number(value: float | None, digits: int = 2, suffix: str = "") -> Cell:
    """A number, or n/a where it is not defined."""
    return Cell("n/a" if value is None else f"{value:.{digits}f}{suffix}")


def share(value: float | None) -> Cell:
    """A share as a percentage with one digit."""
    return Cell("n/a" if value is None else f"{value:.1%}")


def interval(value: Interval | None, digits: int = 2, suffix: str = "") -> Cell:
    """A value and its 95 % interval."""
    if value is None or value.value is None:
        return Cell("n/a")
    if value.low is None or value.high is None:
        return number(value.value, digits, suffix)
    bounds = f"{value.low:.{digits}f} to {value.high:.{digits}f}"
    return Cell(f"{value.value:.{digits}f}{suffix}", bounds)


def speed_table(results: Results) -> Table:
    """Measured speedups, the answer to the question on the page."""
    main = results.drafters[0].name if results.drafters else ""
    rows = [_speed_row(speed) for speed in results.speed]
    return Table(
        "Speed",
        [
            "drafter",
            "prompts",
            "speedup",
            "repeats",
            "draft length",
            "tokens a round",
            "ms a token",
            "plain",
            "tokens/s",
            "first token, ms",
        ],
        rows,
        note=(
            "Speedup is plain seconds over speculative seconds a token, prefill included, on the "
            "same prompts at batch size 1, all decoders side by side round by round: medians of "
            f"{_repeats(results)}, each of which is listed; 95 % intervals resample prompts and "
            "repeats. Greedy decoding."
        ),
        text_columns=frozenset({0, 1}),
        main_rows=frozenset(i for i, s in enumerate(results.speed) if s.drafter == main),
    )


def _repeats(results: Results) -> str:
    """`2 repeats of 10 prompts`; of several suites, of 8 to 10."""
    prompts = sorted({speed.num_prompts for speed in results.speed}) or [0]
    numbers = f"{prompts[0]} to {prompts[-1]}" if len(prompts) > 1 else f"{prompts[0]}"
    repeats = max((speed.num_repeats for speed in results.speed), default=0)
    return f"{repeats} repeats of {numbers} prompts" if repeats > 1 else f"{numbers} prompts, once"


def _speed_row(speed: SpeedResult) -> list[Cell]:
    withheld = speed.speedup is None
    return [
        Cell(speed.drafter),
        Cell(speed.suite),
        Cell("withheld") if withheld else interval(speed.speedup),
        Cell(", ".join(f"{value:.2f}" for value in speed.repeat_speedups)),
        Cell("auto" if speed.is_auto else str(speed.num_draft_tokens)),
        number(speed.acceptance_length),
        Cell("withheld") if withheld else number(speed.ms_per_token, 1),
        number(speed.plain_ms_per_token, 1),
        Cell("withheld") if withheld else number(speed.tokens_per_s, 1),
        number(speed.first_token_ms, 0),
    ]


def acceptance_table(results: Results, *, greedy: bool) -> Table:
    """Acceptance at temperature 0, or at the sampling temperature; the two are never mixed."""
    chosen = [a for a in results.acceptance if (a.temperature == 0) == greedy]
    temperature = "0" if greedy else f"{chosen[0].temperature:g}" if chosen else "1"
    rows = [
        [
            Cell(a.drafter),
            Cell(a.suite),
            interval(a.acceptance_length),
            Cell(str(a.num_draft_tokens)),
            interval(a.acceptance_rate),
            interval(a.acceptance_by_position[0]) if a.acceptance_by_position else Cell("n/a"),
            interval(a.macro_acceptance_length),
            Cell(f"{a.num_looping} of {a.num_prompts}"),
        ]
        for a in chosen
    ]
    return Table(
        f"Acceptance at temperature {temperature}",
        [
            "drafter",
            "prompts",
            "acceptance length",
            "draft length",
            "acceptance rate",
            "position 1",
            "mean of prompts",
            "looping",
        ],
        rows,
        note=_counted(results, chosen)
        if not greedy
        else (
            "Acceptance length: tokens a target pass, recovered or bonus token included, prefill "
            "excluded. Acceptance rate: accepted / drafted. Position 1: rounds whose first draft "
            "was kept / all rounds. Looping: answers that repeat themselves, which inflates "
            "acceptance." + _counted(results, chosen)
        ),
        text_columns=frozenset({0, 1}),
    )


def _counted(results: Results, chosen: list[AcceptanceResult]) -> str:
    """How the counts came about, where not all prompts were decoded with every drafter."""
    replayed = [a for a in chosen if a.num_decoded < a.num_prompts]
    if not replayed:
        return ""
    if replayed[0].temperature == 0:
        most = max(a.num_decoded for a in replayed)
        return (
            " Counted along the target's own texts; decoding with the drafters gave the same counts "
            f"on {most} prompts a suite."
        )
    checks = [
        f"{one.drafter} {one.replayed.value:.2f} and {one.decoded.value:.2f}"
        for one in results.sampled_replay
        if one.replayed and one.decoded and one.replayed.value and one.decoded.value
    ]
    said = f"; by replay and by decoding on some prompts: {', '.join(checks)}" if checks else ""
    return (
        "To be expected of texts that the target sampled, which leaves the chance of acceptance out "
        f"of the intervals{said}."
    )


def exactness_table(results: Results) -> Table:
    """The certificates, one row a check; what holds for every drafter is listed once."""
    rows = []
    seen: list[IdentityCheck] = []
    for certificate in results.exactness:
        for check in certificate.checks:
            if check not in seen:
                shared = all(check in other.checks for other in results.exactness)
                rows.append(_check_row("every drafter" if shared else certificate.drafter, check))
                seen.append(check)
    if results.exactness and results.exactness[0].self_draft_acceptance is not None:
        title = Cell("the target as its own drafter: acceptance rate, 98 % or more", wide=True)
        rate = share(results.exactness[0].self_draft_acceptance)
        rows.append([Cell("every drafter"), title, rate, Cell("")])
    for sampled in results.sampling:
        draws = f"chi-squared on 16-token toys, {sampled.num_draws:,} draws"
        control = f"{sampled.control_p_value:.0e}" if sampled.control_p_value else "0"
        values = f"p-value {sampled.smallest_p_value:.2g}, control {control}"
        rows.append(
            [
                Cell("every drafter"),
                Cell(f"sampling, {sampled.rule}: {draws}", wide=True),
                Cell("passed" if sampled.passed else "FAILED"),
                Cell(values, wide=True),
            ]
        )
    return Table(
        "Exactness",
        ["drafter", "check", "identical", "first difference"],
        rows,
        note=(
            "Sampling: texts drawn by the verification rule, tested against the target's law; it passes "
            f"with a p-value above {SMALLEST_P_VALUE:g}. Control: the p-value of the same rule made "
            "wrong on purpose, which the test has to reject."
            if results.sampling
            else ""
        ),
        text_columns=frozenset({0, 1, 3}),
    )


def _check_row(drafter: str, check: IdentityCheck) -> list[Cell]:
    first = check.divergences[0] if check.divergences else None
    where = "none"
    if first is not None:
        gap = "" if first.top_two_gap is None else f", top-two gap {first.top_two_gap:.2g}"
        where = f"{first.prompt_id}, token {first.position}: {first.kind}{gap}"
    return [
        Cell(drafter),
        Cell(check.name, wide=True),
        Cell(f"{check.num_identical} of {check.num_prompts}"),
        Cell(where, wide=first is not None),
    ]


def replay_table(results: Results) -> Table:
    """Teacher-forced agreement against what decoding measures."""
    rows = [
        [
            Cell(r.drafter),
            Cell(r.suite),
            interval(r.agreement),
            interval(r.overlap),
            interval(r.round_start_agreement),
            interval(r.decoded_first_acceptance),
            Cell({True: "yes", False: "NO", None: "n/a"}[r.agrees]),
            Cell("yes" if r.exact else "NO"),
        ]
        for r in results.replay
    ]
    return Table(
        "Training's view against decoding",
        [
            "drafter",
            "prompts",
            "agreement",
            "overlap",
            "at round starts",
            "decoded position 1",
            "agree",
            "equal counts",
        ],
        rows,
        note=(
            "Agreement: share of the target's own tokens that the drafter would have proposed, all "
            "positions. Overlap: mean of sum(min(target, draft)) at temperature 1. At round starts: "
            "agreement where rounds begin, which is harder than the average position; it must match "
            "the decoded acceptance at position 1, and every count of the replay must equal the "
            "decoder's."
        ),
        text_columns=frozenset({0, 1}),
    )


def cost_table(results: Results) -> Table:
    """Measured costs in passes of the target over one token."""
    longest = max((c.costs.max_draft_tokens for c in results.costs), default=0)
    shown = [k for k in (1, 2, 3, 5, 8) if k <= longest]
    rows = [
        [
            Cell(c.drafter),
            number(1000 * c.costs.target_s, 1),
            number(c.costs.draft_cost, 3),
            *(number(c.costs.verify[k]) for k in shown),
            number(c.costs.overhead, 3),
            number(c.costs.plain_overhead, 3),
        ]
        for c in results.costs
    ]
    return Table(
        "Costs",
        [
            "drafter",
            "target pass, ms",
            "draft cost c",
            *(f"v({k})" for k in shown),
            "overhead o",
            "plain overhead",
        ],
        rows,
        note=(
            "In passes of the target over one token. v(K): a pass over K + 1 tokens. c: one more "
            "drafted token. o: what a round spends outside these passes."
        ),
    )


def facts_table(results: Results) -> Table:
    """What was measured on what."""
    target = results.target
    facts: list[tuple[str, str]] = [
        ("target", target.name),
        ("revision", target.revision or "n/a"),
        ("fingerprint", target.fingerprint),
        ("engine, dtype", f"{target.engine}, {target.dtype}"),
        *((f"drafter {d.name}", _drafter_fact(d.kind, d.folder)) for d in results.drafters),
        *(
            (f"prompts {s.name}", f"{s.num_prompts}, {s.mean_prompt_tokens:.0f} tokens each")
            for s in results.suites
        ),
        *results.machine.items(),
        *((name, str(value)) for name, value in results.settings.items()),
    ]
    rows = [[Cell(name), Cell(value, wide=True)] for name, value in facts]
    return Table("Settings", ["", ""], rows, text_columns=frozenset({0, 1}))


def _drafter_fact(kind: str, folder: str | None) -> str:
    return kind if folder is None else f"{kind}, {folder}"


def summary_table(results: Results) -> Table:
    """A row a drafter and suite: what a terminal shows at the end of a run."""
    lengths = {
        (a.drafter, a.suite): a.acceptance_length for a in results.acceptance if a.temperature == 0
    }
    passed = {c.drafter: c.passed for c in results.exactness}
    rows = [
        [
            Cell(s.drafter),
            Cell(s.suite),
            Cell("yes" if passed.get(s.drafter, False) else "NO"),
            interval(lengths.get((s.drafter, s.suite))),
            Cell(str(s.num_draft_tokens)),
            Cell("withheld") if s.speedup is None else interval(s.speedup, suffix=" x"),
        ]
        for s in _recommended(results)
    ]
    return Table(
        "Result",
        ["drafter", "prompts", "exact", "acceptance length", "draft length", "speedup"],
        rows,
        text_columns=frozenset({0, 1}),
        main_rows=frozenset({0}),
    )


def _recommended(results: Results) -> list[SpeedResult]:
    """The measured speed at the draft length that the verdict speaks of, a row a drafter/suite."""
    best: dict[tuple[str, str], SpeedResult] = {}
    for speed in results.speed:
        best.setdefault((speed.drafter, speed.suite), speed)
    return list(best.values())


def texts(cells: Iterable[Cell]) -> list[str]:
    """Cells as plain text, the interval in parentheses."""
    return [f"{c.text} ({c.range})" if c.range else c.text for c in cells]
