"""Tables: `Table(columns, rows, title)` prints on a console of rich, and `.markdown()` is the same for a report."""

from collections.abc import Iterable, Sequence
from typing import Any

import rich.table


class Table:
    """The first column is text, the others are numbers unless they turn out wide. Cells a row lacks are empty."""

    def __init__(self, columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
        self.columns, self.title = list(columns), title
        self.rows = [[*map(str, row), *[""] * (len(self.columns) - len(row))] for row in rows]

    def __rich__(self) -> rich.table.Table:
        result = rich.table.Table(title=self.title, title_justify="left")
        for index, name in enumerate(self.columns):
            result.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
        for row in self.rows:
            result.add_row(*row)
        return result

    def markdown(self) -> str:
        """The table in Markdown, without its title and without a newline at the end."""
        escaped = [[cell.replace("|", r"\|") for cell in row] for row in (self.columns, *self.rows)]
        lines = [escaped[0], ["---"] * len(self.columns), *escaped[1:]]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
