"""`redraft compare-ar`: diffusion against autoregressive decoding on the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.cli import options
from redraft.cli.measuring import Output, Subject, load
from redraft.errors import RedraftError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redraft.bench.compare_ar import ArmResult, SizeResult
    from redraft.bench.roofline import Roofline
    from redraft.engine.engine import Engine
    from redraft.evaluate.base import Item, Task

    Question = tuple[Task, Item] | None  # None: a prompt of random tokens

TEXT_NOTE = (
    "Token by token the encoder writes, which a generation uses only to read. How good its text is depends on whether "
    "it was trained to predict the next token; what is compared here is speed on the same weights."
)
RANDOM_NOTE = (
    "The weights are random, so that only speed means something: the decoder's own stop is its limit of {steps} "
    "passes, and every answer has {tokens} tokens."
)
REFERENCE_NOTE = "The reference network ran, without fused passes or CUDA graphs: these times do not speak for a GPU."

SPEED_COLUMNS = (
    "batch and decoding", "answer s p50", "p90", "faster by", "ms/token", "tok/s", "tokens/answer", "tokens/forward",
    "ms/pass", "right",
)  # fmt: skip
WORK_COLUMNS = (
    "batch and decoding", "MB/token", "GFLOP/token", "GB/s", "% of bandwidth", "TFLOP/s", "% of matrix product",
    "experts/layer",
)  # fmt: skip


@dataclass(frozen=True)
class ScalingOutput(Output):
    """Output with another plot."""

    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the scaling to a png, svg or pdf (needs matplotlib)."),
    ] = None


@options.grouped
def command(
    *,
    model: options.Model,
    sizes: Annotated[str, typer.Option("--sizes", metavar="N,N,...", help="Answers in a batch.")] = "1,2,4,8,16",
    fixed_passes: Annotated[
        str,
        typer.Option(
            "--fixed-passes", metavar="N,N,...", help="Passes per canvas to force, beside the decoder's own stop."
        ),
    ] = "16",
    task: Annotated[
        str, typer.Option("--task", metavar="NAME", help="Where the prompts come from, as in redraft eval.")
    ] = "everyday",
    data: options.Data = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option("--prompt-tokens", metavar="N", min=1, help="Instead of a task: prompts of N random tokens."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", min=1, help="Prompts. By default as many as the largest batch."),
    ] = None,
    seed: options.Seed = 0,
    max_new_tokens: options.MaxNewTokens = None,
    loading: options.Loading,
    output: ScalingOutput,
) -> None:
    """Answer the same prompts by diffusion and token by token with the encoder: latency, bytes, scaling with batch."""
    from redraft.bench.compare_ar import plot_comparison

    chosen, passes = (
        sorted(set(options.numbers(name, text)))
        for name, text in (("--sizes", sizes), ("--fixed-passes", fixed_passes))
    )
    options.Decoding(seed=seed, max_new_tokens=max_new_tokens).settings()
    count = limit or chosen[-1]
    questions = [None] * count if prompt_tokens else _questions(task, data, count)
    _check_count(len(questions), chosen)
    output.check()
    subject = load(model, loading)
    prompts = _prompts(subject.engine, questions, prompt_tokens, seed)
    results, notes = _measure(subject, prompts, chosen, passes, max_new_tokens, seed)
    rows = [_with_right(result, subject.engine, questions) for result in results]
    roofline = subject.limits.roofline
    _print(rows, len(prompts), roofline)
    for note in notes:
        print(note)
    if output.plot is not None and results[0].arms:
        title = f"{model}, {subject.engine.weights}, {len(prompts)} prompts"
        plot_comparison(output.plot, results, roofline, title)
    about = {"prompts": len(prompts), "prompt_tokens": [*map(len, prompts)], "task": None if prompt_tokens else task}
    output.print({**subject.describe(), **about, "seed": seed, "batches": rows, "notes": notes})
    if results[0].error is not None:
        raise RedraftError(f"nothing was measured: {results[0].error}")


def _questions(task: str, data: Path | None, count: int) -> Sequence[Question]:
    """The first `count` items; of several tasks, each in turn."""
    from redraft.evaluate.tasks import select_tasks

    tasks = select_tasks(task, data).values()
    items = [[(each, item) for item in each.items(-(-count // len(tasks)))] for each in tasks]
    return [question for row in zip(*items, strict=False) for question in row][:count]


def _check_count(count: int, sizes: Sequence[int]) -> None:
    if count < max(sizes):
        raise UsageError(f"{count} prompts do not make a batch of {max(sizes)}; use smaller --sizes or more prompts")
    uneven = [size for size in sizes if count % size]
    if uneven:
        raise UsageError(
            f"{count} prompts cannot be split into batches of {uneven[0]}; choose a --limit that every size divides"
        )


def _prompts(engine: Engine, questions: Sequence[Question], prompt_tokens: int | None, seed: int) -> list[list[int]]:
    from redraft.bench.passes import random_tokens

    if prompt_tokens:
        return random_tokens(engine.config.vocab_size, (len(questions), prompt_tokens), seed, engine.device).tolist()
    return [engine.encode_prompt(question[1].prompt) for question in questions if question]


def _measure(
    subject: Subject,
    prompts: list[list[int]],
    sizes: Sequence[int],
    passes: Sequence[int],
    max_new_tokens: int | None,
    seed: int,
) -> tuple[list[SizeResult], list[str]]:
    """Results by batch size, and what a reader has to know about them."""
    from rich.progress import Progress

    from redraft.bench.compare_ar import batches_of, compare_ar
    from redraft.cli.common import error_console, quiet_libraries
    from redraft.network.arena import check_context
    from redraft.store.random import is_random

    engine = subject.engine
    settings, notes = engine.settings.replace(max_new_tokens=max_new_tokens), [TEXT_NOTE]
    if is_random(subject.model):
        settings = settings.replace(eos_token_ids=())  # an end token among noise would end answers at random
        notes = [RANDOM_NOTE.format(steps=settings.max_denoising_steps, tokens=settings.max_new_tokens)]
    if engine.fused is None or engine.tier != "turbo":
        notes.append(REFERENCE_NOTE)
    length = engine.config.canvas_length
    check_context(engine.config, max(map(len, prompts)), -(-settings.max_new_tokens // length) * length)
    console = error_console()
    with quiet_libraries(), Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("answering", total=batches_of(len(prompts), sizes, len(passes) + 2))
        comparison = compare_ar(
            engine, subject.limits, prompts, sizes=sizes, fixed_passes=passes, settings=settings, seed=seed,
            progress=lambda name: progress.update(bar, advance=1, description=name),
        )  # fmt: skip
        return list(comparison), notes


def _with_right(result: SizeResult, engine: Engine, questions: Sequence[Question]) -> dict[str, Any]:
    """The result's figures, with how many answers of every arm are right where the prompts are not noise."""
    row = result.to_dict()
    if questions[0] is not None:
        for arm in result.arms:
            row["arms"][arm.name]["right"] = _count_right(engine, questions, arm)
    return row


def _count_right(engine: Engine, questions: Sequence[Question], arm: ArmResult) -> int:
    answers = [pair for run in arm.runs for pair in zip(run.answers, run.ended, strict=True)]
    return sum(
        question[0].grade(question[1], engine.decode(tokens), ended=ended)
        for question, (tokens, ended) in zip(questions, answers, strict=False)  # the first round's
        if question is not None
    )


def _print(rows: Sequence[dict[str, Any]], prompts: int, roofline: Roofline) -> None:
    from redraft.cli.common import output_console
    from redraft.tables import Table

    speed: list[Sequence[str]] = []
    work: list[Sequence[str]] = []
    for row in rows:
        if "error" in row:
            speed.append((str(row["batch"]), row["error"]))
            continue
        first = next(iter(row["arms"].values()))["answer_seconds"]["mean"]
        for name, arm in row["arms"].items():
            label, answer, experts = f"{row['batch']} {name}", arm["answer_seconds"], arm["experts_per_layer"]
            speed.append((
                label, f"{answer['p50']:.3f}", f"{answer['p90']:.3f}", f"{first / answer['mean']:.2f}x",
                f"{arm['ms_per_token']:.2f}", f"{arm['tokens_per_second']:,.1f}", f"{arm['tokens_per_answer']:.1f}",
                f"{arm['tokens_per_forward']:.2f}", f"{arm['ms_per_pass']:.3f}",
                f"{arm['right']}/{prompts}" if "right" in arm else "",
            ))  # fmt: skip
            work.append((
                label, f"{arm['bytes_per_token'] / 1e6:,.2f}", f"{arm['flops_per_token'] / 1e9:,.2f}",
                f"{arm['gbps']:,.1f}", f"{arm['share_of_bandwidth']:.1%}", f"{arm['tflops']:,.3f}",
                f"{arm['share_of_matmul']:.1%}", "" if experts is None else f"{experts:.1f}",
            ))  # fmt: skip
    console = output_console()
    console.print(Table(SPEED_COLUMNS, speed))
    console.print(Table(WORK_COLUMNS, work))
    console.print(f"limits measured in this run: {roofline.gbps:,.0f} GB/s, {roofline.tflops:,.3f} TFLOP/s")
