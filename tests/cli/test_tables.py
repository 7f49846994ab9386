"""Tables and lines of stdout: whole in a pipe, folded on a terminal, the same cells in Markdown."""

import re

import pytest

from redraft.cli.common import output_console
from redraft.tables import Table

LONG = "/a/long path/" + "0123456789" * 30
TABLE = Table(("file", "MB|GB"), [(LONG, 1), ("[red]x|y",)], "Sizes")


def test_a_pipe_gets_whole_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    output_console().print(TABLE)
    output_console().print(f"wrote {LONG} [1/2] :ok:")
    title, _, head, _, *rows, _, last = capsys.readouterr().out.splitlines()
    assert title.rstrip() == "Sizes" and last == f"wrote {LONG} [1/2] :ok:"
    assert [[cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")] for line in (head, *rows)] == [
        ["file", "MB|GB"], [LONG, "1"], ["[red]x|y", ""]
    ]  # fmt: skip


def test_a_terminal_folds_cells_but_not_lines(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    output_console().print(TABLE)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) == 40 and len(lines) > 10
    output_console().print(LONG)
    assert capsys.readouterr().out.splitlines() == [LONG]


def test_markdown() -> None:
    assert TABLE.markdown() == f"| file | MB\\|GB |\n| --- | --- |\n| {LONG} | 1 |\n| [red]x\\|y |  |"
