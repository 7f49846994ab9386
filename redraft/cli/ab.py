"""`redraft ab`: the same questions to several forms of a model, side by side in one process."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from redraft.cli import options
from redraft.cli.writing import Interrupted
from redraft.errors import RedraftError

if TYPE_CHECKING:
    from redraft.evaluate.comparison import Comparison
    from redraft.evaluate.results import Folder
    from redraft.evaluate.run import Record

ARMS_HELP = (
    "bf16, w4, w4-off, w4-bitexact, w4-turbo (transformers' generate), engine-bf16, engine-w4, a tier, "
    "entropy_bound=0.2, w4+entropy_bound=0.2, a checkpoint. The first is the baseline."
)
TASKS_HELP = "Tasks of redraft eval, such as gsm8k,humaneval."
FIXED_STEPS_HELP = "Exactly N passes for every canvas, no early stop."
IN_PLACE_HELP = "One set of weights at a time, as when memory does not suffice for all."
OUT_HELP = "The report's directory, ab-MODEL by default; resumes what is there."


def command(
    model: options.Model,
    arms: Annotated[str, typer.Option("--arms", metavar="A,B,...", help=ARMS_HELP)] = "bf16,w4",
    tasks: Annotated[str, typer.Option("--tasks", metavar="NAME,...", help=TASKS_HELP)] = "everyday",
    data: options.Data = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Questions per task, from the first.")] = 50,
    fixed_steps: Annotated[int | None, typer.Option("--fixed-steps", metavar="N", min=1, help=FIXED_STEPS_HELP)] = None,
    seed: options.Seed = 0,
    max_new_tokens: options.MaxNewTokens = None,
    in_place: Annotated[bool, typer.Option("--in-place", help=IN_PLACE_HELP)] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help=OUT_HELP)] = None,
    device: options.Device = None,
    json_output: options.Json = False,
) -> None:
    """Ask several forms of a model the same questions in turn; report speed, accuracy and whether they differ."""
    from redraft.bench.roofline import check_matplotlib
    from redraft.cli.common import output_console, print_json, quiet_libraries
    from redraft.device import pick_device
    from redraft.evaluate.comparison import Comparison
    from redraft.evaluate.report import COMPARISON, cells, order_text, overall, verdict
    from redraft.evaluate.results import Folder
    from redraft.tables import Table

    shared = options.Decoding(seed=seed, max_new_tokens=max_new_tokens).settings()
    check_matplotlib("redraft ab")
    with quiet_libraries():
        comparison = Comparison(
            model, arms, tasks, device=pick_device(device), data=data, limit=limit, seed=seed, fixed_steps=fixed_steps,
            shared=shared, in_place=in_place,
        )  # fmt: skip
        name = re.sub(r"[^\w.-]+", "-", model).strip("-.") or "model"
        folder = Folder(out or Path(f"ab-{name}"), comparison.identity)
        report = comparison.write_report(folder, _answers(comparison, folder))
    if json_output:
        print_json(report)
        return
    console = output_console()
    rows = [(arm["name"], *cells(COMPARISON, overall(report["results"][arm["name"]]))) for arm in report["arms"]]
    console.print(Table(("arm", *COMPARISON), rows))
    for pair in report["comparisons"]:
        console.print(verdict(pair, report).replace("**", ""))
    if not report["together"]:
        console.print(order_text(report))
    console.print(f"{folder.path / 'report.md'}")


def _answers(comparison: Comparison, folder: Folder) -> list[Record]:
    """All answers: those of a finished folder, or those of an interrupted run and the rest."""
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from transformers.utils.logging import disable_progress_bar

    from redraft.cli.common import error_console

    disable_progress_bar()
    if (finished := folder.finished()) is not None:
        print(f"redraft: note: {folder.path} is complete; its report is written again", file=sys.stderr)
        return finished
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = error_console()
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    bar = progress.add_task("loading", total=None)

    def told(record: Record, done: int, total: int) -> None:
        progress.update(bar, completed=done, total=total, description=f"{record.arm}: {record.id}")

    try:
        with progress:
            return comparison.run(folder, told)
    except torch.OutOfMemoryError:
        advice = "--in-place and another --out keep one set of weights at a time"
        raise RedraftError(f"{comparison.device} ran out of memory; {advice}") from None
    except KeyboardInterrupt:
        kept = f"answers are kept in {folder.path}, the same command goes on from there"
        raise Interrupted(f"interrupted; {kept}") from None
