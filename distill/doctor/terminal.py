"""What was found, in the terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distill.doctor.finding import Level
from distill.doctor.page import Report
from distill.doctor.pieces import pieces_of
from distill.doctor.rows import Row
from distill.doctor.statistics import histogram
from distill.templates import ChatTemplate

_COLOURS = {Level.error: "bold red", Level.warning: "yellow", Level.note: "cyan"}
_BAR_WIDTH = 40


def show(report: Report, template: ChatTemplate, console: Console, *, num_rows: int) -> None:
    """Prints conversations, numbers and findings, the findings last."""
    for row in report.rows[:num_rows]:
        console.rule(f"{row.id} ({len(row.token_ids)} tokens, {row.num_trained} trained)")
        console.print(coloured(row, template), soft_wrap=True)
    if num_rows and report.rows:
        console.rule()
        console.print(
            "[dim]not trained on[/dim], [green]trained on[/green], [reverse]special tokens[/reverse]"
        )
    console.print(_numbers(report))
    console.print(_lengths(report))
    for finding in report.findings:
        line = Text(f"{finding.level.value}: ", style=_COLOURS[finding.level])
        console.print(line.append(finding.text, style="default"))
    counted = ", ".join(
        f"{sum(finding.level is level for finding in report.findings)} {level.value}s"
        for level in Level
    )
    console.print(f"{report.title}: {counted}", style="bold")


def coloured(row: Row, template: ChatTemplate) -> Text:
    """A row as text: what is trained on in green, special tokens reversed."""
    text = Text()
    for piece in pieces_of(row, template.tokenizer, template.special):
        style = "green" if piece.is_trained else "dim"
        text.append(piece.text, style=f"{style} reverse" if piece.is_special else style)
    return text


def _numbers(report: Report) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in report.numbers:
        table.add_row(name, value)
    return table


def _lengths(report: Report) -> Text:
    bars = histogram(report.statistics.lengths)
    most = max((count for *_, count in bars), default=1)
    text = Text()
    for low, high, count in bars:
        bar = "#" * round(_BAR_WIDTH * count / most)
        text.append(f"{low:6}-{high:<6} {bar} {count}\n", style="dim")
    return text
