"""Rows as a plain table on standard output: as wide as its content, so that nothing is cut in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
    """Columns in ``right`` are set to the right. On a terminal, text beyond its width is folded, not cut."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i in right else "left", overflow="fold", no_wrap=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if terminal else 10_000)
    console.print(table)
