"""Writes an evaluation: results.json, report.html, report.md and failures.jsonl of one folder."""

import json
from pathlib import Path

from eval.records import to_json, write_json, write_text
from eval.report_html import render_html
from eval.report_markdown import render_markdown
from eval.results import Results
from eval.trace import Trace, WeakPrefix


def write_report(
    folder: Path, results: Results, traces: list[Trace], weak: list[WeakPrefix]
) -> None:
    """Write all files of an evaluation; each is replaced as a whole."""
    write_results(folder, results)
    write_text(folder / "report.html", render_html(results, traces, weak))
    write_text(folder / "report.md", render_markdown(results))
    lines = [json.dumps(to_json(prefix)) + "\n" for prefix in weak]
    write_text(folder / "failures.jsonl", "".join(lines))


def write_results(folder: Path, results: Results) -> None:
    """results.json alone: what an evaluation has found so far."""
    write_json(folder / "results.json", results)
