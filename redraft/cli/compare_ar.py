"""`redraft compare-ar`: diffusion against autoregressive decoding on the same weights."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.cli import options
from redraft.cli.measuring import Output, Subject, load
from redraft.errors import RedraftError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redraft.bench.compare_ar import Comparison, SizeResult
    from redraft.bench.roofline import Roofline
    from redraft.config import DecodeSettings
    from redraft.evaluate.base import Item, Task

TEXT_NOTE = (
    "Token by token the encoder writes, which a generation uses only to read. How good its text is depends on whether "
    "it was trained to predict the next token; what is compared here is speed on the same weights."
)
RANDOM_NOTE = (
    "The weights are random, so that only speed means something: the decoder's own stop is its limit of {steps} "
    "passes, and every answer has {tokens} tokens."
)
REFERENCE_NOTE = "The reference network ran, without fused passes or CUDA graphs: these times do not speak for a GPU."

# Columns of the two tables, and an arm's figures in them.
SPEED = {
    "answer s p50": "{answer_seconds[p50]:.3f}", "p90": "{answer_seconds[p90]:.3f}", "faster by": "{faster:.2f}x",
    "ms/token": "{ms_per_token:.2f}", "tok/s": "{tokens_per_second:,.1f}", "tokens/answer": "{tokens_per_answer:.1f}",
    "tokens/forward": "{tokens_per_forward:.2f}", "ms/pass": "{ms_per_pass:.3f}", "right": "{right}",
}  # fmt: skip
WORK = {
    "MB/token": "{mb_per_token:,.2f}", "GFLOP/token": "{gflop_per_token:,.2f}", "GB/s": "{gbps:,.1f}",
    "% of bandwidth": "{share_of_bandwidth:.1%}", "TFLOP/s": "{tflops:,.3f}",
    "% of matrix product": "{share_of_matmul:.1%}", "experts/layer": "{experts}",
}  # fmt: skip


@options.grouped
def command(
    *,
    model: options.Model,
    sizes: Annotated[str, typer.Option("--sizes", metavar="N,N,...", help="Answers in a batch.")] = "1,2,4,8,16",
    fixed_passes: Annotated[str, typer.Option(
        "--fixed-passes", metavar="N,N,...", help="Passes per canvas to force, beside the decoder's own stop."
    )] = "16",
    task: Annotated[str, typer.Option(
        "--task", metavar="NAME", help="Where the prompts come from, as in redraft eval."
    )] = "everyday",
    data: options.Data = None,
    prompt_tokens: Annotated[int | None, typer.Option(
        "--prompt-tokens", metavar="N", min=1, help="Instead of a task: prompts of N random tokens."
    )] = None,
    limit: Annotated[int | None, typer.Option(
        "--limit", metavar="N", min=1, help="Prompts. By default as many as the largest batch."
    )] = None,
    seed: options.Seed = 0, max_new_tokens: options.MaxNewTokens = None, loading: options.Loading,
    plot: Annotated[Path | None, typer.Option(
        "--plot", metavar="FILE", help="Draw the scaling to a png, svg or pdf (needs matplotlib)."
    )] = None,
    json_output: options.Json = False,
) -> None:  # fmt: skip
    """Answer the same prompts by diffusion and token by token with the encoder: latency, bytes, scaling with batch."""
    from redraft.bench.compare_ar import Comparison, plot_comparison
    from redraft.bench.passes import random_tokens

    chosen = sorted(set(options.numbers("--sizes", sizes)))
    passes = sorted(set(options.numbers("--fixed-passes", fixed_passes)))
    options.Decoding(seed=seed, max_new_tokens=max_new_tokens).settings()
    count = limit or chosen[-1]
    questions = [] if prompt_tokens else _questions(task, data, count)
    _check_count(count if prompt_tokens else len(questions), chosen)
    output = Output(plot, json_output)
    output.check()
    subject = load(model, loading)
    engine, roofline = subject.engine, subject.limits.roofline
    prompts = [engine.encode_prompt(item.prompt) for _, item in questions]
    if prompt_tokens:
        prompts = random_tokens(engine.config.vocab_size, (count, prompt_tokens), seed, engine.device).tolist()
    settings, notes = _settings(subject, max_new_tokens, max(map(len, prompts)))
    comparison = Comparison(engine, roofline, prompts, chosen, passes, settings, seed)
    notes += [REFERENCE_NOTE] if comparison.lockstep else []
    results = _run(comparison)
    rows = [_row(result, comparison, questions) for result in results]
    _print(rows, len(prompts), roofline)
    print(*notes, sep="\n")
    if plot is not None and results[0].arms:
        plot_comparison(plot, results, roofline, f"{model}, {engine.weights}, {len(prompts)} prompts")
    about = {"prompts": len(prompts), "prompt_tokens": [*map(len, prompts)], "task": None if prompt_tokens else task}
    output.print({**subject.describe(), **about, "seed": seed, "batches": rows, "notes": notes})
    if results[0].error is not None:
        raise RedraftError(f"nothing was measured: {results[0].error}")


def _questions(task: str, data: Path | None, count: int) -> Sequence[tuple[Task, Item]]:
    """The first `count` items; of several tasks, each in turn."""
    from redraft.evaluate.tasks import select_tasks

    tasks = select_tasks(task, data).values()
    items = [[(each, item) for item in each.items(-(-count // len(tasks)))] for each in tasks]
    return [*chain.from_iterable(zip(*items, strict=False))][:count]


def _check_count(count: int, sizes: Sequence[int]) -> None:
    if count < max(sizes):
        raise UsageError(f"{count} prompts do not make a batch of {max(sizes)}; use smaller --sizes or more prompts")
    uneven = [size for size in sizes if count % size]
    if uneven:
        raise UsageError(
            f"{count} prompts cannot be split into batches of {uneven[0]}; choose a --limit that every size divides"
        )


def _settings(subject: Subject, max_new_tokens: int | None, longest: int) -> tuple[DecodeSettings, list[str]]:
    """Settings of the answers, and what a reader has to know about them. Raises UsageError when they are too long."""
    from redraft.network.arena import check_context
    from redraft.store.random import is_random

    engine = subject.engine
    settings, note = engine.settings.replace(max_new_tokens=max_new_tokens), TEXT_NOTE
    if is_random(subject.model):
        settings = settings.replace(eos_token_ids=())  # an end token among noise would end answers at random
        note = RANDOM_NOTE.format(steps=settings.max_denoising_steps, tokens=settings.max_new_tokens)
    length = engine.config.canvas_length
    check_context(engine.config, longest, -(-settings.max_new_tokens // length) * length)
    return settings, [note]


def _run(comparison: Comparison) -> list[SizeResult]:
    from rich.progress import Progress

    from redraft.cli.common import error_console, quiet_libraries

    console = error_console()
    with quiet_libraries(), Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("answering", total=comparison.total)
        return list(comparison.run(lambda arm: progress.update(bar, advance=1, description=arm)))


def _row(result: SizeResult, comparison: Comparison, questions: Sequence[tuple[Task, Item]]) -> dict[str, Any]:
    """The result's figures, with how many answers of every arm are right where the prompts are not noise."""
    row, ends = result.to_dict(), comparison.settings.eos_token_ids
    for name, answered in result.arms.items() if questions else ():
        answers = [answer for batch in answered for answer in batch.answers]
        row["arms"][name]["right"] = sum(
            task.grade(item, comparison.engine.decode(tokens), ended=tokens[-1] in ends)
            for (task, item), tokens in zip(questions, answers, strict=False)  # the first round's
        )
    return row


def _print(rows: Sequence[dict[str, Any]], prompts: int, roofline: Roofline) -> None:
    from redraft.cli.common import output_console
    from redraft.tables import Table

    speed: list[Sequence[str]] = []
    work: list[Sequence[str]] = []
    for row in rows:
        if "error" in row:
            speed.append((row["batch"], row["error"]))
        for name, arm in row.get("arms", {}).items():
            first, experts = next(iter(row["arms"].values())), arm["experts_per_layer"]
            shown = {
                **arm,
                "faster": first["answer_seconds"]["mean"] / arm["answer_seconds"]["mean"],
                "mb_per_token": arm["bytes_per_token"] / 1e6,
                "gflop_per_token": arm["flops_per_token"] / 1e9,
                "right": f"{arm['right']}/{prompts}" if "right" in arm else "",
                "experts": "" if experts is None else f"{experts:.1f}",
            }
            for table, columns in ((speed, SPEED), (work, WORK)):
                table.append((f"{row['batch']} {name}", *(cell.format(**shown) for cell in columns.values())))
    console = output_console()
    console.print(Table(("batch and decoding", *SPEED), speed))
    console.print(Table(("batch and decoding", *WORK), work))
    console.print(f"limits measured in this run: {roofline.gbps:,.0f} GB/s, {roofline.tflops:,.3f} TFLOP/s")
