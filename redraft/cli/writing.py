"""What the commands that write a checkpoint share: arguments, the progress bar, what Ctrl-C leaves, the report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.errors import RedraftError

if TYPE_CHECKING:
    from redraft.quant.report import QuantReport

Bf16Source = Annotated[str, typer.Argument(metavar="SRC", help="A BF16 checkpoint: a directory, a hub id, or 'demo'.")]
Target = Annotated[str, typer.Argument(metavar="DST", help="The directory to write; it must be new or empty.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that DST holds.")]


class Interrupted(RedraftError):
    """Ctrl-C, with the way to go on: 128 + SIGINT."""

    exit_code = 130


def write(
    what: str, dst: str, json_output: bool, work: Callable[..., Any], show: Callable[[Any, str], None], **facts: object
) -> None:
    """Run `work(progress=...)` and print its report, a dataclass, by `show` or as JSON with `facts` and `dst`.

    On a terminal it has a progress bar. Ctrl-C becomes one line that says how to go on.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from redraft.cli.common import error_console, print_json
    from redraft.store.workdir import partial_path

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Bar(*columns, console=error_console(), transient=True) as bar:
            task = bar.add_task(what, total=None)
            report = work(progress=lambda done, total: bar.update(task, completed=done, total=total))
    except KeyboardInterrupt:
        kept, advice = partial_path(dst), "nothing was kept"
        if kept.exists():
            advice = f"finished files are kept in {kept}: run the same command to resume, or delete it"
        raise Interrupted(f"interrupted, {dst} was not written; {advice}") from None
    if json_output:
        print_json({**dataclasses.asdict(report), **facts, "destination": dst})
    else:
        show(report, dst)


def show_packed(report: QuantReport, dst: str) -> None:
    """The outcome of packing as tables, and the sizes."""
    from redraft.cli.common import output_console
    from redraft.tables import Table

    console = output_console()
    rows = []
    for error in report.tensors:
        sqnr = math.inf if error.sqnr_db is None else error.sqnr_db
        rows.append((error.name.removeprefix("model.decoder."), f"{sqnr:.2f}", f"{error.relative_error:.4f}"))
    console.print(Table(("quantised", "SQNR dB", "relative error"), rows, "Rounding error"))
    kept = [(part.part, str(part.tensors), f"{part.bytes / 1e6:,.2f}", part.reason) for part in report.kept]
    console.print(Table(("kept as it was", "tensors", "MB", "why"), kept))
    before, after = report.bytes_before, report.bytes_after
    console.print(f"{dst}: {before / 1e6:,.1f} MB -> {after / 1e6:,.1f} MB ({before / after:.2f}x smaller)")
