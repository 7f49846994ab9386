"""What the commands that write a checkpoint share: the progress bar, and what Ctrl-C leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from redraft.cli.quantize import Interrupted

if TYPE_CHECKING:
    from redraft.checkpoint import Progress

T = TypeVar("T")


def with_progress(what: str, dst: str, write: Callable[[Progress], T]) -> T:
    """Run `write` with a progress callback; Ctrl-C becomes one line that says how to go on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from redraft.quant.workdir import partial_path

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
