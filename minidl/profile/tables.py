"""Tables: on a terminal by rich, wide plain text where the output is piped, Markdown for documents."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence

Cells = Sequence[Sequence[str]]


def show(title: str, columns: Sequence[str], rows: Cells, *, notes: Sequence[str] = ()) -> None:
    """Print a table: the first column to the left, numbers to the right, nothing cut off where it is piped."""
    if not sys.stdout.isatty() or not _by_rich(title, columns, rows):
        print(plain(title, columns, rows))
    for note in notes:
        print(note)
    sys.stdout.flush()


def _by_rich(title: str, columns: Sequence[str], rows: Cells) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    console = Console()
    if len(max(plain("", columns, rows).splitlines(), key=len)) > console.width:
        return False  # names cut to three letters say nothing
    table = Table(title=title, box=None, header_style="bold", title_justify="left")
    for i, column in enumerate(columns):
        justify = "left" if _is_text(i, rows) else "right"
        table.add_column(column, justify=justify, overflow="ellipsis" if i == 0 else "fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    return True


def _is_text(i: int, rows: Cells) -> bool:
    """Whether a column holds words, which are set to the left."""
    return i == 0 or (bool(rows) and all(row[i][:1].isalpha() or not row[i] for row in rows))


def plain(title: str, columns: Sequence[str], rows: Cells) -> str:
    """As text of fixed width, as wide as its content."""
    lines = [list(columns), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    words = [_is_text(i, rows) for i in range(len(columns))]
    text = [title]
    for line in lines:
        cells = zip(line, widths, words, strict=True)
        text.append("  ".join(c.ljust(width) if word else c.rjust(width) for c, width, word in cells).rstrip())
    return "\n".join(text)


def markdown(columns: Sequence[str], rows: Cells, words: Container[int] = (0,)) -> str:
    """As a Markdown table; the columns of these numbers hold words, which are set to the left."""
    head = [list(columns), ["---" if i in words else "---:" for i in range(len(columns))]]
    return "\n".join("| " + " | ".join(line) + " |" for line in [*head, *map(list, rows)])
