"""report.md: the verdict and the tables, for terminals, pull requests and drafter cards."""

from eval.breakdown import BY_CLASS, BY_CONTEXT, BY_ENTROPY, BY_POSITION
from eval.report_extras import (
    breakdown_table,
    category_table,
    difference_table,
    former_failures_table,
    length_table,
    parts_table,
    policy_table,
    rival_table,
    sweep_table,
    what_if_table,
)
from eval.report_html import main_verdict
from eval.report_tables import (
    Table,
    acceptance_table,
    cost_table,
    exactness_table,
    facts_table,
    replay_table,
    speed_table,
    texts,
)
from eval.results import Results
from eval.serving import serving_table
from eval.verdict import fastest


def render_markdown(results: Results) -> str:
    """The whole report as Markdown."""
    verdict = main_verdict(results)
    lines = [f"# Evaluation of {', '.join(d.name for d in results.drafters)}", ""]
    if verdict is not None:
        lines += [f"**{verdict.sentence}**", ""]
        if verdict.next_step:
            lines += [f"Next: {verdict.next_step}.", ""]
        if other := fastest(results):
            lines += [other, ""]
    for flag in results.flags:
        lines += [f"- {flag.level}: {flag.message}"]
    lines += [""] if results.flags else []
    tables = [
        speed_table(results),
        acceptance_table(results, greedy=True),
        acceptance_table(results, greedy=False),
        difference_table(results),
        category_table(results),
        exactness_table(results),
        replay_table(results),
        cost_table(results),
        parts_table(results),
    ]
    if verdict is not None:
        tables.append(length_table(results, verdict.drafter, verdict.suite))
        key = (verdict.drafter, verdict.suite)
        tables += [what_if_table(p) for p in results.predictions if (p.drafter, p.suite) == key]
        kinds = (BY_CLASS, BY_ENTROPY, BY_POSITION, BY_CONTEXT)
        tables += [breakdown_table(results, verdict.drafter, by) for by in kinds]
    tables += [
        former_failures_table(results),
        policy_table(results),
        rival_table(results),
        sweep_table(results),
    ]
    tables += [serving_table(results), facts_table(results)]
    return "\n".join([*lines, *(markdown_table(table) for table in tables if table.rows)])


def markdown_table(table: Table) -> str:
    """A GitHub-flavoured table with its heading and note."""
    aligned = [":--" if i in table.text_columns else "--:" for i, _ in enumerate(table.columns)]
    rows = [table.columns, aligned, *(texts(row) for row in table.rows)]
    body = "\n".join("| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in rows)
    note = f"\n{table.note}\n" if table.note else ""
    return f"## {table.title}\n\n{body}\n{note}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
