"""report.html: one self-contained page, verdict first; no network, light and dark, phone or desk.

Plots are SVG (charts.py), tables come from report_tables.py, the page's frame, style and the
script of the trace viewer lie in templates/.
"""

import json
from html import escape
from importlib.resources import files
from pathlib import Path
from textwrap import shorten

from eval.breakdown import BY_CATEGORY, BY_CLASS, BY_CONTEXT, BY_ENTROPY, BY_POSITION
from eval.exactness import AGAINST_PLAIN
from eval.html_tables import html_table, html_tables
from eval.report_extras import (
    baseline_table,
    breakdown_table,
    category_table,
    definition_table,
    difference_table,
    former_failures_table,
    length_table,
    parts_table,
    policy_table,
    rival_table,
    sweep_table,
    what_if_table,
)
from eval.report_plots import (
    TIMES,
    breakdown_plot,
    decomposition_plots,
    position_plot,
    speed_plots,
    sweep_plots,
)
from eval.report_tables import (
    Cell,
    Table,
    acceptance_table,
    cost_table,
    exactness_table,
    facts_table,
    interval,
    number,
    replay_table,
    speed_table,
)
from eval.results import Prediction, Results, Verdict
from eval.serving import serving_table
from eval.trace import Trace, WeakPrefix
from eval.verdict import fastest

MAX_WEAK_PREFIXES = 12  # rows of the table; all of them are in failures.jsonl
BREAKDOWN_NOTE = (
    "Acceptance rate: accepted / drafted, of the tokens that were to stand at such places; greedy, and "
    "sampled. The rest is greedy. Where reached: the rate of those with everything drafted in front of "
    "them kept. Tokens a round: of rounds that begin there. Agreement: share of all such tokens that the drafter would have "
    "proposed, wherever rounds begin; overlap: mean of sum(min(target, draft)) there."
)
MAX_PROMPT_CHARS = 240  # of a prompt above its trace


def render_html(results: Results, traces: list[Trace], weak: list[WeakPrefix]) -> str:
    """The whole page as text."""
    sections = [
        _header(results),
        _section(
            "Does it pay?",
            "Time per token against the fastest plain decoding of the same target.",
            html_table(speed_table(results)) + speed_plots(results),
        ),
        _section(
            "What eats the gain, and what would help",
            "The ideal speedup is the number of tokens a round; each cost takes its part of it.",
            _costs(results),
        ),
        _section(
            "How much is accepted",
            "Greedy and sampled decoding are different questions and are never averaged.",
            _acceptance(results),
        ),
        _section(
            "Is the output still the target's?",
            "Greedy texts compared token by token.",
            html_table(exactness_table(results)),
        ),
        _section(
            "Does training see what serving does?",
            "One pass of the drafter over the target's own outputs, held against decoding.",
            html_table(replay_table(results)),
        ),
        _section(
            "Token by token",
            "Point at a token for its round and both models' most probable tokens.",
            _traces(traces),
        ),
        _section(
            "Where it does well and where it fails",
            "Acceptance by kind of place in the target's own texts. failures.jsonl holds the places "
            "where target and drafter agree least, as prefixes that the next run can train on.",
            _breakdown(results)
            + _weak_table(weak)
            + html_table(former_failures_table(results), titled=True),
        ),
        _section(
            "In other settings",
            "",
            sweep_plots(results)
            + html_tables(policy_table(results), rival_table(results), sweep_table(results)),
        ),
        _section(
            "Serve it with",
            "Draft lengths under each server's own names.",
            html_tables(serving_table(results)),
        ),
        _section("Numbers for comparison", "", _comparison(results)),
    ]
    body = "\n".join(section for section in sections if section)
    page = _template("report.html")
    for name, value in {
        "title": escape(f"Draftloop: {_title(results)}"),
        "css": _template("report.css"),
        "js": _template("report.js"),
        "traces": _script_json([trace.as_json() for trace in traces]),
        "body": body,
    }.items():
        page = page.replace("{{" + name + "}}", value)
    return page


def main_verdict(results: Results) -> Verdict | None:
    """The verdict that the page opens with: of the first drafter on the first suite."""
    if not results.drafters or not results.verdicts:
        return None
    name = results.drafters[0].name
    return next((v for v in results.verdicts if v.drafter == name), results.verdicts[0])


def _template(name: str) -> str:
    return files("eval").joinpath("templates", name).read_text(encoding="utf-8").rstrip("\n")


def _title(results: Results) -> str:
    drafter = results.drafters[0].name if results.drafters else "no drafter"
    return f"{drafter} for {Path(results.target.name).name}"


def _script_json(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def _section(title: str, lead: str, content: str) -> str:
    if not content:
        return ""
    paragraph = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section><h2>{escape(title)}</h2>{paragraph}{content}</section>"


def _header(results: Results) -> str:
    verdict = main_verdict(results)
    machine = results.machine.get("processor", "")
    eyebrow = (
        f'<p class="eyebrow"><b>Draftloop</b> &middot; {escape(_title(results))} &middot; '
        f"{escape(machine)} &middot; {escape(results.created[:10])}</p>"
    )
    parts = [eyebrow]
    if verdict is not None:
        kind = {True: "yes", False: "no", None: "unclear"}[verdict.pays]
        headline = escape(verdict.headline.replace(" x", TIMES))
        sentence = escape(verdict.sentence.replace("95 %", "95\u00a0%"))
        remarks = [fastest(results), verdict.next_step and f"Next: {verdict.next_step}."]
        advice = "".join(f"<small>{escape(remark)}</small>" for remark in remarks if remark)
        parts.append(
            f'<div class="verdict"><p class="number {kind}">{headline}</p>'
            f'<h1 class="sentence">{sentence}{advice}</h1></div>'
        )
    if not results.complete:
        parts.append(
            '<ul class="flags"><li class="warning">This evaluation is not complete.</li></ul>'
        )
    parts.append(_tiles(results))
    parts.append(_flags(results))
    return f"<header>{''.join(parts)}</header>"


def _tiles(results: Results) -> str:
    """The four numbers that a reader looks for first."""
    if not results.drafters:
        return ""
    name = results.drafters[0].name
    tiles: list[tuple[str, str, str]] = []
    greedy = next((a for a in results.acceptance if a.drafter == name and a.temperature == 0), None)
    if greedy is not None:
        value = interval(greedy.acceptance_length)
        tiles.append(
            (
                "tokens a round",
                value.text,
                f"{value.range or 'no interval'}, greedy, {greedy.num_draft_tokens} drafted, "
                f"{greedy.suite}",
            )
        )
    prediction = next((p for p in results.predictions if p.drafter == name), None)
    if prediction is not None:
        best = prediction.best_num_draft_tokens
        why = "by measured costs" if best else "plain decoding is faster"
        tiles.append(("draft length to use", str(best) if best else "none", why))
    certificate = next((c for c in results.exactness if c.drafter == name), None)
    checks = (
        [c for c in certificate.checks if c.name.startswith(AGAINST_PLAIN)] if certificate else []
    )
    if certificate is not None and checks:
        identical, compared = (
            sum(counts)
            for counts in zip(*((c.num_identical, c.num_prompts) for c in checks), strict=True)
        )
        same = f"{identical} of {compared}"
        tiles.append(("texts identical to plain decoding", same, certificate.dtype))
    speed = next((s for s in results.speed if s.drafter == name), None)
    if speed is not None and speed.speedup is not None:
        plain = f"plain decoding {speed.plain_ms_per_token:.1f} ms"
        tiles.append(("time per token", f"{speed.ms_per_token:.1f} ms", plain))
    cells = "".join(
        f'<div><div class="what">{escape(what)}</div><div class="big">{escape(big)}</div>'
        f'<div class="more">{escape(more)}</div></div>'
        for what, big, more in tiles
    )
    return f'<div class="tiles">{cells}</div>' if cells else ""


def _flags(results: Results) -> str:
    order = {"error": 0, "warning": 1, "note": 2}
    items = "".join(
        f'<li class="{flag.level}"><b>{flag.level.capitalize()}:</b> {escape(flag.message)}</li>'
        for flag in sorted(results.flags, key=lambda flag: order[flag.level])
    )
    return f'<ul class="flags">{items}</ul>' if items else ""


def _costs(results: Results) -> str:
    main = _main_prediction(results)
    if main is None:
        return html_table(cost_table(results))
    assumed = html_table(what_if_table(main))
    details = (
        f"<details><summary>What each &quot;if&quot; takes for granted</summary>{assumed}</details>"
    )
    checked = html_table(parts_table(results), titled=True)
    return decomposition_plots(results, main) + details + html_table(cost_table(results)) + checked


def _main_prediction(results: Results) -> Prediction | None:
    verdict = main_verdict(results)
    if verdict is None:
        return None
    wanted = (verdict.drafter, verdict.suite)
    return next((p for p in results.predictions if (p.drafter, p.suite) == wanted), None)


def _acceptance(results: Results) -> str:
    plots = []
    for greedy in (True, False):
        for suite in [suite.name for suite in results.suites]:
            chosen = [
                a
                for a in results.acceptance
                if (a.temperature == 0) == greedy and a.suite == suite and a.num_drafted
            ]
            plots.append(position_plot(chosen, suite))
    tables = html_table(acceptance_table(results, greedy=True), titled=True)
    tables += html_table(acceptance_table(results, greedy=False), titled=True)
    tables += html_table(difference_table(results), titled=True)
    tables += html_table(category_table(results), titled=True)
    return tables + (f'<div class="plots">{"".join(plots)}</div>' if any(plots) else "")


def _traces(traces: list[Trace]) -> str:
    if not traces:
        return ""
    key = (
        '<div class="key"><span class="accepted">drafted and kept</span>'
        '<span class="corrected">corrected by the target</span>'
        '<span class="bonus">bonus token</span><span>not drafted</span></div>'
    )
    blocks = []
    for index, trace in enumerate(traces):
        spans = []
        for i, token in enumerate(trace.tokens):
            start = " start" if i and token.round != trace.tokens[i - 1].round else ""
            focus = ' tabindex="0"' if i == 0 else ""
            spans.append(
                f'<span class="{token.kind}{start}" data-token="{i}"{focus}>'
                f"{escape(token.text)}</span>"
            )
        prompt = shorten(trace.prompt, MAX_PROMPT_CHARS, placeholder=" ...")
        asked = f"{escape(trace.suite)}, {escape(trace.prompt_id)}: {escape(prompt)}"
        summary = f"{trace.num_tokens} tokens in {len(trace.rounds)} rounds"
        blocks.append(
            f'<div class="trace" data-trace="{index}"><p class="asked">{asked} &middot; {summary}</p>'
            f'<div class="tokens">{"".join(spans)}</div></div>'
        )
    return key + "".join(blocks)


def _breakdown(results: Results) -> str:
    """Acceptance of the first drafter by kind of place: ranges as plots, all kinds as tables."""
    if not results.drafters:
        return ""
    name = results.drafters[0].name
    ranges = (
        (BY_ENTROPY, "target's entropy, nats"),
        (BY_POSITION, "tokens into the answer"),
        (BY_CONTEXT, "tokens in front, prompt included"),
    )
    plots = "".join(
        breakdown_plot(results, name, by, label, temperature)
        for temperature in sorted({b.temperature for b in results.breakdown})
        for by, label in ranges
    )
    tables = "".join(
        html_table(breakdown_table(results, name, by), titled=True)
        for by in (BY_CLASS, BY_CATEGORY)
    )
    behind = "".join(
        html_table(breakdown_table(results, name, by), titled=True) for by, _ in ranges
    )
    if tables:
        tables += f'<p class="note">{escape(BREAKDOWN_NOTE)}</p>'
    if behind:
        tables += f"<details><summary>The plots' figures</summary>{behind}</details>"
    weak = f"<h3>Where {escape(name)} agrees least</h3>" if tables else ""
    return (f'<div class="plots">{plots}</div>' if plots else "") + tables + weak


def _weak_table(weak: list[WeakPrefix]) -> str:
    rows = [
        [
            Cell(w.suite),
            Cell("..." + w.tail, wide=True),
            Cell(w.target_text),
            Cell(w.draft_text),
            number(w.overlap),
            number(w.target_probability),
        ]
        for w in weak[:MAX_WEAK_PREFIXES]
    ]
    return html_table(
        Table(
            "Where it fails",
            ["prompts", "after", "target says", "drafter says", "overlap", "target's probability"],
            rows,
            text_columns=frozenset({0, 1, 2, 3}),
        )
    )


def _comparison(results: Results) -> str:
    main = _main_prediction(results)
    parts = []
    if main is not None:
        parts.append(html_table(length_table(results, main.drafter, main.suite), titled=True))
    parts.append(html_table(baseline_table(results), titled=True))
    name = results.drafters[0].name if results.drafters else ""
    greedy = next((a for a in results.acceptance if a.drafter == name and a.temperature == 0), None)
    if greedy is not None:
        parts.append(html_table(definition_table(greedy), titled=True))
    facts = html_table(facts_table(results))
    parts.append(f"<details><summary>Settings, machine and versions</summary>{facts}</details>")
    parts.append(
        "<footer>Written by <code>python -m eval</code>. results.json beside this page holds every "
        "number, with the counts behind it.</footer>"
    )
    return "".join(parts)
