"""`redraft compare-ar`: diffusion against autoregressive decoding on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.cli import options
from redraft.errors import RedraftError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redraft.bench.compare_ar import ArmResult, SizeResult
    from redraft.bench.probe import Probe
    from redraft.engine.engine import Engine
    from redraft.evaluate.tasks import Item, Task

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


def command(
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
    weights: options.Weights = None,
    tier: options.TierOption = None,
    device: options.Device = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the scaling to a png, svg or pdf (needs matplotlib)."),
    ] = None,
    json_output: options.Json = False,
) -> None:
    """Answer the same prompts by diffusion and token by token with the encoder: latency, bytes, scaling with batch."""
    from redraft.bench.compare_ar import plot_comparison
    from redraft.bench.probe import probe
    from redraft.bench.roofline import check_plot
    from redraft.cli.common import describe, error_console, load_engine, print_json, quiet_libraries
    from redraft.device import environment

    chosen, passes = _numbers("--sizes", sizes), _numbers("--fixed-passes", fixed_passes)
    options.decode_settings(seed, max_new_tokens, None, None)
    count = limit or max(chosen)
    questions = [None] * count if prompt_tokens else _questions(task, data, count)
    _check_count(len(questions), chosen)
    if plot is not None:
        check_plot(plot)
    engine = load_engine(model, weights, tier, device)
    prompts = _prompts(engine, questions, prompt_tokens, seed)
    with quiet_libraries(), error_console().status("measuring the machine"):
        limits = probe(engine.device)
    results, notes = _measure(engine, model, limits, prompts, chosen, passes, max_new_tokens, seed)
    right = {result.batch: _right(engine, questions, result) for result in results}
    _print(results, right, len(prompts), limits)
    for note in notes:
        print(note)
    if plot is not None and results[0].arms:
        plot_comparison(plot, results, limits.roofline, f"{model}, {engine.weights}, {len(prompts)} prompts")
    if json_output:
        rows = [_with_right(result.to_dict(), right[result.batch]) for result in results]
        about = {
            "prompts": len(prompts),
            "prompt_tokens": [len(p) for p in prompts],
            "task": None if prompt_tokens else task,
        }
        machine = {"probe": limits.to_dict(), "environment": environment(engine.device)}
        print_json({**describe(engine, model), **about, "seed": seed, "batches": rows, "notes": notes, **machine})
    if results[0].error is not None:
        raise RedraftError(f"nothing was measured: {results[0].error}")


def _numbers(option: str, text: str) -> tuple[int, ...]:
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise UsageError(f"{option} is {text!r}, expected numbers such as 1,4,16")
    return tuple(sorted({int(number) for number in numbers}))


def _questions(task: str, data: Path | None, count: int) -> Sequence[Question]:
    """The first `count` items; of several tasks, each in turn."""
    from redraft.evaluate.tasks import select_tasks

    tasks = select_tasks(task, data).values()
    items = [[(each, item) for item in each.items(-(-count // len(tasks)))] for each in tasks]
    return [question for row in zip(*items, strict=False) for question in row][:count]


def _check_count(count: int, sizes: tuple[int, ...]) -> None:
    if count < max(sizes):
        raise UsageError(f"{count} prompts do not make a batch of {max(sizes)}; use smaller --sizes or more prompts")
    uneven = [size for size in sizes if count % size]
    if uneven:
        raise UsageError(
            f"{count} prompts cannot be split into batches of {uneven[0]}; choose a --limit that every size divides"
        )


def _prompts(engine: Engine, questions: Sequence[Question], prompt_tokens: int | None, seed: int) -> list[list[int]]:
    from redraft.bench.step import random_tokens

    if prompt_tokens:
        return random_tokens(engine.config.vocab_size, (len(questions), prompt_tokens), seed, engine.device).tolist()
    return [engine.encode_prompt(question[1].prompt) for question in questions if question]


def _measure(
    engine: Engine,
    model: str,
    limits: Probe,
    prompts: list[list[int]],
    sizes: tuple[int, ...],
    passes: tuple[int, ...],
    max_new_tokens: int | None,
    seed: int,
) -> tuple[list[SizeResult], list[str]]:
    """Results by batch size, and what a reader has to know about them."""
    from rich.progress import Progress

    from redraft.bench.compare_ar import batches_of, compare_ar
    from redraft.cli.common import error_console, quiet_libraries
    from redraft.network.arena import check_context
    from redraft.store.random import is_random

    settings, notes = engine.settings.replace(max_new_tokens=max_new_tokens), [TEXT_NOTE]
    if is_random(model):
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
            engine, limits, prompts, sizes=sizes, fixed_passes=passes, settings=settings, seed=seed,
            progress=lambda name: progress.update(bar, advance=1, description=name),
        )  # fmt: skip
        return list(comparison), notes


def _right(engine: Engine, questions: Sequence[Question], result: SizeResult) -> dict[str, int]:
    """How many answers of every arm are right; no arms where prompts are noise."""
    return {arm.name: _count_right(engine, questions, arm) for arm in result.arms if questions[0] is not None}


def _count_right(engine: Engine, questions: Sequence[Question], arm: ArmResult) -> int:
    answers = [pair for run in arm.runs for pair in zip(run.answers, run.ended, strict=True)]
    return sum(
        question[0].grade(question[1], engine.decode(tokens), ended=ended)
        for question, (tokens, ended) in zip(questions, answers, strict=False)  # the first round's
        if question is not None
    )


def _with_right(row: dict[str, Any], right: dict[str, int]) -> dict[str, Any]:
    for name, count in right.items():
        row["arms"][name]["right"] = count
    return row


def _print(results: Sequence[SizeResult], right: dict[int, dict[str, int]], prompts: int, limits: Probe) -> None:
    from redraft.cli.common import output_console
    from redraft.tables import Table

    console = output_console()
    speed: list[Sequence[str]] = []
    work: list[Sequence[str]] = []
    for result in results:
        if result.error is not None:
            speed.append((str(result.batch), result.error))
            continue
        arms = result.to_dict()["arms"]
        first = next(iter(arms.values()))["answer_seconds"]["mean"]
        for name, arm in arms.items():
            answer, correct = arm["answer_seconds"], right[result.batch].get(name)
            label = f"{result.batch} {name}"
            speed.append((
                label, f"{answer['p50']:.3f}", f"{answer['p90']:.3f}", f"{first / answer['mean']:.2f}x",
                f"{arm['ms_per_token']:.2f}", f"{arm['tokens_per_second']:,.1f}", f"{arm['tokens_per_answer']:.1f}",
                f"{arm['tokens_per_forward']:.2f}", f"{arm['ms_per_pass']:.3f}",
                "" if correct is None else f"{correct}/{prompts}",
            ))  # fmt: skip
            experts = arm["experts_per_layer"]
            work.append((
                label, f"{arm['bytes_per_token'] / 1e6:,.2f}", f"{arm['flops_per_token'] / 1e9:,.2f}",
                f"{arm['gbps']:,.1f}", f"{arm['share_of_bandwidth']:.1%}", f"{arm['tflops']:,.3f}",
                f"{arm['share_of_matmul']:.1%}", "" if experts is None else f"{experts:.1f}",
            ))  # fmt: skip
    console.print(Table(SPEED_COLUMNS, speed))
    console.print(Table(WORK_COLUMNS, work))
    roofline = limits.roofline
    console.print(f"limits measured in this run: {roofline.gbps:,.0f} GB/s, {roofline.tflops:,.3f} TFLOP/s")
