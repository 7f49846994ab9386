"""`redraft eval`: how often a model is right, how sure that figure is, and how fast it was."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from redraft.cli import options

DEFAULT_BATCH_SIZE = 8
BATCH_SIZE_HELP = f"Items answered together: {DEFAULT_BATCH_SIZE}; 1 for everyday and where a batch shares one seed."
TASK_HELP = "gsm8k, humaneval, math500, everyday, demo:NAME or demo:all."
OUT_HELP = "Per-item results, JSON lines; an interrupted run resumes."


@options.grouped
def command(
    *,
    model: options.Model,
    task: Annotated[str, typer.Option("--task", metavar="NAME", help=TASK_HELP)],
    data: options.Data = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Items per task, from the first.")] = 100,
    batch_size: Annotated[int | None, typer.Option("--batch-size", metavar="N", min=1, help=BATCH_SIZE_HELP)] = None,
    decoding: options.Decoding,
    loading: options.Loading,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help=OUT_HELP)] = None,
    json_output: options.Json = False,
) -> None:
    """Grade a model on a task: accuracy with a 95 % interval, speed, steps per canvas, time to answer."""
    from rich.progress import Progress

    from redraft.cli.common import describe, error_console, print_json, quiet_libraries
    from redraft.evaluate.base import ask
    from redraft.evaluate.results import Results, check_target, run_id
    from redraft.evaluate.run import Record, evaluate
    from redraft.evaluate.summary import by_task, summarise
    from redraft.evaluate.tasks import select_tasks

    settings = decoding.settings()
    tasks = select_tasks(task, data)
    questions = ask(tasks.values(), limit, decoding.seed)
    if out is not None:
        check_target(out)
    engine = loading.engine(model)
    about = {**describe(engine, model), "seed": decoding.seed, "limit": limit, "settings": settings}
    # In a batch an answer takes as long as the slowest, so questions about the time to answer go alone.
    size = batch_size or (DEFAULT_BATCH_SIZE if engine.tier == "turbo" and task != "everyday" else 1)
    prompts = {name: [q.item.prompt for q in questions if q.task.name == name] for name in tasks}
    console = error_console()
    progress = Progress(console=console, transient=True, disable=not console.is_terminal)
    with Results(out, run_id({**about, "prompts": prompts})) as results, quiet_libraries(), progress:
        if reused := len(results.records):
            print(f"redraft: note: {reused} items are done already and are not run again", file=sys.stderr)
        bar = progress.add_task("", total=len(questions), completed=reused)

        def told(record: Record) -> None:
            right = sum(r.correct for r in results.records)
            progress.update(bar, advance=1, description=f"{record.task}: {right}/{len(results.records)} correct")

        new = evaluate(engine, questions, batch_size=size, settings=settings, done=results.done)
        records = results.gather(new, told)
    figures = by_task(records, list(tasks), summarise)
    if json_output:
        by_name = {"tasks": {name: figures.pop(name) for name in tasks}, **figures}  # what is left is over all tasks
        print_json({**about, "batch_size": size, "reused_items": reused, **by_name})
    else:
        print(table(figures))


def table(figures: dict[str, dict[str, Any]]) -> str:
    """The figures as aligned plain text, one line per task."""
    from redraft.evaluate.report import EVALUATION, cells

    rows = [["task", *EVALUATION], *([name, *cells(EVALUATION, each)] for name, each in figures.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
