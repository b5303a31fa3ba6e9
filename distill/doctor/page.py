"""The same as one page of HTML that needs no other file and no network."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from distill.doctor.finding import Finding
from distill.doctor.pieces import pieces_of
from distill.doctor.rows import Row
from distill.doctor.statistics import Statistics, histogram
from distill.durable import save_text
from distill.templates import ChatTemplate

_SHOWN = 12  # conversations on the page, from all sources

_STYLE = """
:root { --text: #1c2128; --dim: #767d87; --page: #ffffff; --card: #f5f6f8; --line: #dde0e5;
  --on: #d3f2dc; --on-edge: #57b378; --mark: #e4e0f5; --error: #c22f2f; --warning: #9a6500;
  --note: #2a6cb0; --bar: #7f9fc6; }
@media (prefers-color-scheme: dark) { :root { --text: #e2e5ea; --dim: #8d949f; --page: #16181c;
  --card: #1f2227; --line: #343941; --on: #1f4630; --on-edge: #4c9c6b; --mark: #3a3654;
  --error: #f08080; --warning: #e2b04a; --note: #79b4ee; --bar: #5877a0; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
ul.findings { list-style: none; padding: 0; }
ul.findings li { background: var(--card); border-left: 4px solid; padding: .5rem .8rem;
  margin: .4rem 0; }
ul.findings li.error { border-color: var(--error); }
ul.findings li.warning { border-color: var(--warning); }
ul.findings li.note { border-color: var(--note); } li b { text-transform: capitalize; }
li.error b { color: var(--error); } li.warning b { color: var(--warning); }
li.note b { color: var(--note); } li .remedy { color: var(--dim); display: block; }
table { border-collapse: collapse; } td { padding: .15rem 1.2rem .15rem 0; vertical-align: top; }
td:first-child { color: var(--dim); }
.bars { display: grid; grid-template-columns: 7rem 1fr; gap: 2px .8rem; font-size: .85rem; }
.bars i { display: block; background: var(--bar); height: 100%; min-width: 1px; }
.bars div { display: grid; grid-template-columns: 1fr 3rem; gap: .5rem; }
.bars > span { color: var(--dim); text-align: right; }
details { background: var(--card); margin: .5rem 0; padding: .5rem .8rem; }
summary { cursor: pointer; }
pre { font: 13px/1.55 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
pre span { border-right: 1px solid var(--line); color: var(--dim); }
pre span.on { background: var(--on); border-color: var(--on-edge); color: var(--text); }
pre span.special { background: var(--mark); }
pre span.special.on { outline: 1px solid var(--on-edge); }
"""


@dataclass(frozen=True)
class Report:
    """Everything that is shown.

    Attributes:
        ahead: name and value of what is still to be done.
        rows: all of them; a few are shown.
    """

    title: str
    findings: list[Finding]
    statistics: Statistics
    ahead: list[tuple[str, str]]
    rows: list[Row]

    @property
    def numbers(self) -> list[tuple[str, str]]:
        """Name and value of every number, for people."""
        found = self.statistics
        sources = ", ".join(f"{count:,} {name}" for name, count in found.sources.items())
        lengths = sorted(found.lengths) or [0]
        lines = [
            ("rows", f"{len(found.lengths):,} ({sources})"),
            ("tokens", f"{found.num_tokens:,}, trained on {found.num_trained:,}{self._share}"),
            (
                "length of a row",
                f"median {lengths[len(lengths) // 2]}, nine in ten up to "
                f"{lengths[len(lengths) * 9 // 10]}, longest {lengths[-1]}",
            ),
        ]
        if found.batches:
            lines.append(("padding", f"{found.padding:.1%} of the positions of a batch"))
        if found.covered is not None:
            lines.append(("draft vocabulary", f"holds {found.covered:.2%} of other answers"))
        return lines + self.ahead

    @property
    def _share(self) -> str:
        found = self.statistics
        return f" ({found.num_trained / found.num_tokens:.0%})" if found.num_trained else ""


def write_page(path: Path, report: Report, template: ChatTemplate) -> None:
    """Writes the page; it is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_text(path, render(report, template))


def render(report: Report, template: ChatTemplate) -> str:
    """The page as text."""
    shown = [
        _conversation(row, template, is_open=i == 0) for i, row in enumerate(_varied(report.rows))
    ]
    numbers = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
        for name, value in report.numbers
    )
    title = escape(f"Data: {report.title}")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>
<body><h1>{title}</h1>
<h2>Findings</h2><ul class="findings">{"".join(map(_finding, report.findings))}</ul>
<h2>Numbers</h2><table>{numbers}</table>
<h2>Tokens of a row</h2><div class="bars">{_bars(report.statistics.lengths)}</div>
<h2>Conversations</h2>
<p>As the target sees them, a box a token. <span class="key">Green is trained on</span>; special
tokens are violet.</p>
{"".join(shown)}</body></html>
"""


def _finding(finding: Finding) -> str:
    remedy = f'<span class="remedy">{escape(finding.remedy)}</span>' if finding.remedy else ""
    level = finding.level.value
    return f'<li class="{level}"><b>{level}</b> {escape(finding.sentence)}{remedy}</li>'


def _bars(lengths: Sequence[int]) -> str:
    bars = histogram(lengths)
    most = max((count for *_, count in bars), default=1)
    return "".join(
        f'<span>{low} to {high}</span><div><i style="width:{100 * count / most:.1f}%"></i>'
        f"<span>{count}</span></div>"
        for low, high, count in bars
    )


def _varied(rows: Sequence[Row]) -> list[Row]:
    """Some rows of every source, in turn."""
    sources: dict[str, list[Row]] = {}
    for row in rows:
        sources.setdefault(row.source, []).append(row)
    chosen: list[Row] = []
    for number in range(_SHOWN):
        chosen += [members[number] for members in sources.values() if number < len(members)]
    return chosen[:_SHOWN]


def _conversation(row: Row, template: ChatTemplate, *, is_open: bool) -> str:
    head = f"{row.id}: {len(row.token_ids)} tokens, {row.num_trained} trained on"
    body = "".join(_spans(row, template))
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{escape(head)}</summary><pre>{body}</pre></details>"


def _spans(row: Row, template: ChatTemplate) -> Iterable[str]:
    for piece in pieces_of(row, template.tokenizer, template.special):
        names = " ".join(
            name
            for name, holds in (("on", piece.is_trained), ("special", piece.is_special))
            if holds
        )
        attribute = f' class="{names}"' if names else ""
        yield f"<span{attribute}>{escape(piece.text)}</span>"
