"""Tables of report_tables.py as HTML."""

from html import escape

from eval.report_tables import Cell, Table

MANY_RANGES = 6  # intervals in a row from which each stands below its value


def html_table(table: Table, *, titled: bool = False) -> str:
    """One table, its title above it if asked for, its note below; empty without rows."""
    if not table.rows:
        return ""
    head = "".join(
        f"<th{_text_class(table, i)}>{escape(name)}</th>" for i, name in enumerate(table.columns)
    )
    rows = "".join(_row(table, index) for index in range(len(table.rows)))
    title = f"<h3>{escape(table.title)}</h3>" if titled else ""
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    header = f"<thead><tr>{head}</tr></thead>" if any(table.columns) else ""
    most = max(sum(bool(cell.range) for cell in row) for row in table.rows)
    dense = ' class="dense"' if most >= MANY_RANGES else ""
    body = f"<table{dense}>{header}<tbody>{rows}</tbody></table>"
    return f'{title}<div class="table">{body}</div>{note}'


def _row(table: Table, index: int) -> str:
    emphasis = ' class="main"' if index in table.main_rows else ""
    cells = "".join(_cell(table, i, cell) for i, cell in enumerate(table.rows[index]))
    return f"<tr{emphasis}>{cells}</tr>"


def _text_class(table: Table, column: int) -> str:
    return ' class="text"' if column in table.text_columns else ""


def _cell(table: Table, column: int, cell: Cell) -> str:
    classes = [
        *(["text"] if column in table.text_columns else []),
        *(["wide"] if cell.wide else []),
    ]
    names = " ".join(classes)
    attribute = f' class="{names}"' if classes else ""
    bounds = f'<span class="range">{escape(cell.range)}</span>' if cell.range else ""
    return f"<td{attribute}>{escape(cell.text)}{bounds}</td>"


def html_tables(*tables: Table) -> str:
    """Those that have rows."""
    filled = [table for table in tables if table.rows]
    return "".join(html_table(table, titled=len(filled) > 1) for table in filled)
