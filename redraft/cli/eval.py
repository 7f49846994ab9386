"""`redraft eval`: how often a model is right, how sure that figure is, and how fast it was."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.cli import options

if TYPE_CHECKING:
    from redraft.engine.engine import Engine
    from redraft.evaluate.run import Record, ResultsFile
    from redraft.evaluate.tasks import Item, Task

DEFAULT_BATCH_SIZE = 8


def command(
    model: options.Model,
    task: Annotated[
        str,
        typer.Option("--task", metavar="NAME", help="gsm8k, humaneval, math500, everyday, demo:NAME or demo:all."),
    ],
    data: options.Data = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Items per task, from the first.")] = 100,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            metavar="N",
            min=1,
            help=f"Items answered together: {DEFAULT_BATCH_SIZE}; 1 for everyday and where a batch shares one seed.",
        ),
    ] = None,
    seed: options.Seed = 0,
    max_new_tokens: options.MaxNewTokens = None,
    entropy_bound: options.EntropyBound = None,
    steps: options.Steps = None,
    weights: options.Weights = None,
    tier: options.TierOption = None,
    device: options.Device = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Per-item results, JSON lines; an interrupted run resumes."),
    ] = None,
    json_output: options.Json = False,
) -> None:
    """Grade a model on a task: accuracy with a 95 % interval, speed, steps per canvas, time to answer."""
    from redraft.cli.common import describe, load_engine, print_json
    from redraft.evaluate.run import check_target
    from redraft.evaluate.tasks import select_tasks

    settings = options.decode_settings(seed, max_new_tokens, entropy_bound, steps)
    tasks = select_tasks(task, data)
    items = {name: each.items(limit) for name, each in tasks.items()}
    if out is not None:
        check_target(out)
    engine = load_engine(model, weights, tier, device)
    about = {**describe(engine, model), "seed": seed, "limit": limit, "settings": settings}
    # In a batch an answer takes as long as the slowest, so questions about the time to answer go alone.
    size = batch_size or (DEFAULT_BATCH_SIZE if engine.tier == "turbo" and task != "everyday" else 1)
    with _results_file(out, about, items) as file:
        reused = len(file.done) if file else 0
        records = _run(engine, tasks, items, seed, size, settings, file)
    report = {**about, "batch_size": size, "reused_items": reused, **_summaries(records, list(tasks))}
    if json_output:
        print_json(report)
    else:
        print(table({**report["tasks"], **({"all": report["all"]} if "all" in report else {})}))


def _results_file(
    out: Path | None, about: dict[str, Any], items: dict[str, Sequence[Item]]
) -> AbstractContextManager[ResultsFile[Record] | None]:
    from redraft.evaluate.run import Record, ResultsFile, run_id

    if out is None:
        return nullcontext()
    prompts = {name: [item.prompt for item in its] for name, its in items.items()}
    return ResultsFile(out, run_id({**about, "prompts": prompts}), Record)


def _run(
    engine: Engine,
    tasks: dict[str, Task],
    items: dict[str, Sequence[Item]],
    seed: int,
    batch_size: int,
    settings: dict[str, Any],
    file: ResultsFile[Record] | None,
) -> list[Record]:
    """All records, those of an interrupted run first; each new one goes to the file at once."""
    from rich.progress import Progress

    from redraft.cli.common import error_console, quiet_libraries
    from redraft.evaluate.run import evaluate

    records = list(file.done) if file else []
    if records:
        print(f"redraft: note: {len(records)} items are done already and are not run again", file=sys.stderr)
    skip = {record.id for record in records}
    console = error_console()
    with quiet_libraries(), Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=sum(map(len, items.values())), completed=len(records))
        for name, task in tasks.items():
            for record in evaluate(
                engine, task, items[name], seed=seed, batch_size=batch_size, settings=settings, skip=skip
            ):
                if file:
                    file.append(record)
                records.append(record)
                right = sum(r.correct for r in records)
                progress.update(bar, advance=1, description=f"{name}: {right}/{len(records)} correct")
    return records


def _summaries(records: list[Record], names: list[str]) -> dict[str, Any]:
    """Figures per task, and over all of them where there are several."""
    from redraft.evaluate.run import summarise

    tasks = {name: summarise([r for r in records if r.task == name]) for name in names}
    return {"tasks": tasks, **({"all": summarise(records)} if len(names) > 1 else {})}


def table(summaries: dict[str, dict[str, Any]]) -> str:
    """The figures as aligned plain text, one line per task."""
    head = ("task", "correct", "accuracy", "95 % interval", "tok/s", "tok/forward", "steps mean/p50/p90")
    rows = [(*head, "answer s mean/p50/p90", "seconds")]
    for name, s in summaries.items():
        low, high = s["interval"]
        steps, answer = s["steps_per_canvas"], s["answer_seconds"]
        rows.append(
            (
                name,
                f"{s['correct']}/{s['items']}",
                f"{100 * s['accuracy']:.1f} %",
                f"{100 * low:.1f} to {100 * high:.1f}",
                f"{s['tokens_per_second']:.1f}",
                f"{s['tokens_per_forward']:.2f}",
                f"{steps['mean']:.1f} / {steps['p50']:g} / {steps['p90']:g}",
                f"{answer['mean']:.2f} / {answer['p50']:.2f} / {answer['p90']:.2f}",
                f"{s['seconds']:.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
