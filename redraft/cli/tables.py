"""Tables of measurements on stdout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from redraft.cli.common import on_terminal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PIPE_WIDTH = 200  # a file has no width: long lines there are better than cut ones


def table_console() -> Console:
    """Stdout for tables: as wide as the terminal, or as a table needs in a pipe."""
    terminal = on_terminal()
    return Console(force_terminal=terminal, highlight=False, width=None if terminal else PIPE_WIDTH, soft_wrap=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """The first column is text, the others are numbers unless they turn out wide."""
    result = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        result.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result
