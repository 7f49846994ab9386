"""What the commands that write a checkpoint share: the progress bar, what Ctrl-C leaves behind, the report."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from redraft.errors import RedraftError

if TYPE_CHECKING:
    from redraft.quant.report import QuantReport
    from redraft.store.read import Progress

T = TypeVar("T")


class Interrupted(RedraftError):
    """Ctrl-C, with the way to go on: 128 + SIGINT."""

    exit_code = 130


def with_progress(what: str, dst: str, write: Callable[[Progress], T]) -> T:
    """Run `write` with a progress callback; Ctrl-C becomes one line that says how to go on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from redraft.store.workdir import partial_path

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None)
            return write(lambda done, total: bar.update(task, completed=done, total=total))
    except KeyboardInterrupt:
        kept = partial_path(dst)
        advice = f"finished files are kept in {kept}: run the same command to resume, or delete it"
        raise Interrupted(
            f"interrupted, {dst} was not written; {advice if kept.exists() else 'nothing was kept'}"
        ) from None


def print_report(report: QuantReport, dst: str) -> None:
    """The outcome of packing as tables, and the sizes."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    errors = Table("quantised", "SQNR dB", "relative error", title="Rounding error")
    for tensor in report.tensors:
        name = tensor.name.removeprefix("model.decoder.")
        sqnr = math.inf if tensor.sqnr_db is None else tensor.sqnr_db
        errors.add_row(name, f"{sqnr:.2f}", f"{tensor.relative_error:.4f}")
    console.print(errors)
    kept = Table("kept as it was", "tensors", "MB", "why")
    for part in report.kept:
        kept.add_row(part.part, str(part.tensors), f"{part.bytes / 1e6:,.2f}", part.reason)
    console.print(kept)
    before, after = report.bytes_before, report.bytes_after
    console.print(f"{dst}: {before / 1e6:,.1f} MB -> {after / 1e6:,.1f} MB ({before / after:.2f}x smaller)")
