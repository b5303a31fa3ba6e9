"""Tables beside the main ones: what would help, details, what is measured on request."""

from eval.breakdown import BY_CATEGORY
from eval.definitions import other_numbers
from eval.groups import BreakdownResult, CategoryResult
from eval.intervals import Interval
from eval.report_tables import Cell, Table, interval, number
from eval.results import AcceptanceResult, Prediction, Results


def what_if_table(prediction: Prediction) -> Table:
    """Predicted speedups if one thing changed, with what each takes for granted."""
    return Table(
        f"What would help: {prediction.drafter} on {prediction.suite}",
        ["if", "speedup", "taken for granted"],
        [
            [Cell(one.name, wide=True), Cell(f"{one.speedup:.2f}"), Cell(one.assumes, wide=True)]
            for one in prediction.what_if
        ],
        note="Predicted from measured acceptance and costs, each at its own best draft length.",
        text_columns=frozenset({0, 2}),
    )


def difference_table(results: Results) -> Table:
    """Other drafters against the first, prompt by prompt."""
    return Table(
        "Other drafters against the first, on the same prompts",
        ["drafter", "prompts", "temperature", "acceptance length", "difference", "sure"],
        [
            [
                Cell(one.drafter),
                Cell(one.suite),
                Cell(f"{one.temperature:g}"),
                Cell(f"{one.second:.2f} against {one.first:.2f}"),
                interval(one.difference),
                Cell("yes" if one.is_sure else "no"),
            ]
            for one in results.differences
        ],
        note=(
            "Paired: both drafters' counts of the same prompts are resampled together, so that "
            "what prompts do to both drops out. Sure: the 95 % interval leaves out 0."
        ),
        text_columns=frozenset({0, 1}),
    )


def former_failures_table(results: Results) -> Table:
    """Places where an earlier drafter failed."""
    return Table(
        "Where an earlier drafter failed",
        ["drafter", "right now", "places"],
        [
            [Cell(one.drafter), interval(one.right), Cell(f"{one.num_right} of {one.num_prefixes}")]
            for one in results.former_failures
        ],
        note=(
            "The earlier drafter was wrong at all of them. A drafter that errs elsewhere is right at "
            "some of them without having learnt anything: compare with the agreement above."
        ),
    )


def breakdown_table(results: Results, drafter: str, by: str) -> Table:
    """Acceptance of one drafter by kind of place: greedy, and the sampled rate beside it."""
    rows: dict[tuple[str, str], list[BreakdownResult | None]] = {}  # greedy, sampled
    told = _with_categories(results) if by == BY_CATEGORY else {s.name for s in results.suites}
    for one in results.breakdown:
        if (one.drafter, one.by) == (drafter, by) and one.suite in told:
            rows.setdefault((one.suite, one.group), [None, None])[one.temperature > 0] = one
    return Table(
        f"By {by}: {drafter}",
        [
            *("prompts", by, "acceptance rate", "sampled", "where reached", "tokens a round"),
            *("agreement", "overlap", "drafted"),
        ],
        [
            [
                *map(Cell, place),
                *(interval(one.acceptance_rate if one else None) for one in found),
                *(interval(value) for value in _greedy_values(found[0])),
                Cell(f"{found[0].num_drafted:.0f}" if found[0] else "n/a"),
            ]
            for place, found in rows.items()
        ],
        text_columns=frozenset({0, 1}),
    )


def _greedy_values(found: BreakdownResult | None) -> list[Interval | None]:
    if found is None:
        return [None] * 4
    return [
        found.conditional_acceptance,
        found.acceptance_length,
        found.agreement,
        found.overlap,
    ]


def parts_table(results: Results) -> Table:
    """Where predicted and measured speedup part: every part of a round, predicted and timed."""
    names = [part.name for p in results.predictions[:1] for part in p.parts]
    rows = []
    for one in results.predictions:
        if not one.parts or one.predicted_at_measured is None or one.deviation is None:
            continue
        timed = one.predicted_at_measured / (1 + one.deviation)
        parts = [Cell(f"{part.predicted:.3f} / {part.timed:.3f}") for part in one.parts]
        speedup = Cell(f"{one.predicted_at_measured:.2f} / {timed:.2f}")
        rows.append(
            [Cell(one.drafter), Cell(one.suite), speedup, Cell(f"{one.deviation:+.1%}"), *parts]
        )
    return Table(
        "Predicted / measured, part by part",
        ["drafter", "prompts", "decode speedup", "deviation", *names],
        rows,
        note=(
            "Parts of a round in passes of the target over one token. Predicted from the costs above "
            "and the rounds that the timed prompts had; measured on the clock of those rounds."
        ),
        text_columns=frozenset({0, 1}),
    )


def category_table(results: Results) -> Table:
    """Acceptance length by category of the prompts, greedy and sampled side by side."""
    rows: dict[tuple[str, str, str], list[CategoryResult]] = {}
    for one in results.categories:
        if one.suite in _with_categories(results):
            rows.setdefault((one.drafter, one.suite, one.category), []).append(one)
    return Table(
        "Acceptance length by category",
        ["drafter", "prompts", "category", "number", "temperature 0", "sampled"],
        [
            [
                *map(Cell, place),
                Cell(str(found[0].num_prompts)),
                _of_temperature(found, is_greedy=True),
                _of_temperature(found, is_greedy=False),
            ]
            for place, found in rows.items()
        ],
        note="The draft length is that of the acceptance tables; one prompt has no interval.",
        text_columns=frozenset({0, 1, 2}),
    )


def _with_categories(results: Results) -> set[str]:
    """Suites whose prompts are of several kinds."""
    return {suite.name for suite in results.suites if len(suite.categories) > 1}


def _of_temperature(found: list[CategoryResult], *, is_greedy: bool) -> Cell:
    chosen = [one.acceptance_length for one in found if (one.temperature == 0) == is_greedy]
    return interval(chosen[0]) if chosen else Cell("n/a")


def definition_table(result: AcceptanceResult) -> Table:
    """One result under other programs' definitions."""
    rows = [
        [Cell(o.program), Cell(o.name), Cell(o.how, wide=True), number(o.value, 3)]
        for o in other_numbers(result)
    ]
    return Table(
        f"As other programs would print it: {result.drafter} on {result.suite}",
        ["program", "name", "definition", "value"],
        rows,
        text_columns=frozenset({0, 1, 2}),
    )


def length_table(results: Results, drafter: str, suite: str) -> Table:
    """Predicted speedup by draft length, beside what was measured."""
    prediction = next(
        (p for p in results.predictions if (p.drafter, p.suite) == (drafter, suite)), None
    )
    sampled = next(
        (r for r in results.sampled_replay if (r.drafter, r.suite) == (drafter, suite)), None
    )
    lengths = sampled.lengths if sampled is not None else []
    expected = {one.num_draft_tokens: one.acceptance_length for one in lengths}
    measured = {
        s.num_draft_tokens: s
        for s in results.speed
        if (s.drafter, s.suite, s.is_auto) == (drafter, suite, False)
    }
    rows = []
    for length in prediction.lengths if prediction else []:
        speed = measured.get(length.num_draft_tokens)
        rows.append(
            [
                Cell(str(length.num_draft_tokens)),
                number(length.acceptance_length),
                interval(expected.get(length.num_draft_tokens)),
                number(length.speedup),
                interval(speed.decode_speedup) if speed else Cell(""),
                _break_even(length.break_even_acceptance),
            ]
        )
    return Table(
        f"Draft length: {drafter} on {suite}",
        [
            "draft length",
            "acceptance length",
            "sampled",
            "predicted",
            "measured",
            "break-even acceptance",
        ],
        rows,
        note=(
            "Greedy; sampled: the acceptance length to be expected at the sampling temperature. "
            "Speedups of decoding alone. Break-even above 1: not even a perfect drafter would pay."
        ),
        main_rows=frozenset(
            i
            for i, length in enumerate(prediction.lengths if prediction else [])
            if prediction and length.num_draft_tokens == prediction.best_num_draft_tokens
        ),
    )


def _break_even(value: float | None) -> Cell:
    return Cell("above 1") if value is None else number(value)


def baseline_table(results: Results) -> Table:
    """Ways to decode the target without a drafter; the fastest is the baseline."""
    rows = [
        [Cell(b.name), number(b.tokens_per_s, 1), Cell("baseline" if b.used else "")]
        for b in results.baselines
    ]
    return Table("Plain decoding", ["decoder", "tokens/s", ""], rows)


def policy_table(results: Results) -> Table:
    """Ways to choose the draft length, on the same texts."""
    return Table(
        "Draft-length policies",
        ["drafter", "prompts", "policy", "acceptance length", "drafted a round", "speedup"],
        [
            [
                Cell(one.drafter),
                Cell(one.suite),
                Cell(one.policy, wide=True),
                Cell(f"{one.acceptance_length:.2f}"),
                Cell(f"{one.mean_drafted:.2f}"),
                Cell(f"{one.speedup:.2f}"),
            ]
            for one in results.policies
        ],
        note="Replayed along the target's greedy texts; speedups predicted from measured costs.",
        text_columns=frozenset({0, 1, 2}),
    )


def rival_table(results: Results) -> Table:
    """Another program with the same drafter, beside ours."""
    return Table(
        "The same drafter in another program",
        ["drafter", "program", "draft length", "its ms a token", "ours", "ratio", "same texts"],
        [
            [
                Cell(one.drafter),
                Cell(one.program),
                Cell(str(one.num_draft_tokens)),
                Cell(f"{one.rival_ms_per_token:.1f}"),
                Cell(f"{one.ms_per_token:.1f}"),
                Cell(f"{one.rival_ms_per_token / one.ms_per_token:.2f}"),
                Cell(f"{one.num_identical} of {one.num_prompts}"),
            ]
            for one in results.rivals
        ],
        note=(
            "Greedy decoding of the same prompts, interleaved, prefill included. Where it computes in 16 "
            "bits and ours in 32, near ties end differently."
        ),
        text_columns=frozenset({0, 1}),
    )


def sweep_table(results: Results) -> Table:
    """Speed by batch size and context length."""
    return Table(
        "Batch sizes and context lengths",
        ["drafter", "batch", "context", "draft length", "plain tokens/s", "tokens/s", "speedup"],
        [
            [
                Cell(one.drafter),
                Cell(str(one.batch_size)),
                Cell(str(one.context_tokens)),
                Cell(str(one.num_draft_tokens)),
                Cell(f"{one.plain_tokens_per_s:.1f}"),
                Cell(f"{one.tokens_per_s:.1f}"),
                Cell(f"{one.speedup:.2f}" + ("" if one.measured else " (predicted)")),
            ]
            for one in results.sweeps
        ],
        note=(
            "Batch sizes: measured, prefill excluded, texts not ended by the end token. Context "
            "lengths: predicted from the costs measured there and the acceptance of the first suite."
        ),
        text_columns=frozenset({0}),
    )
