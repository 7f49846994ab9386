"""`redraft bench`: how fast a model's passes, its batches and single kernels are here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.cli import options
from redraft.cli.common import describe, print_json, working
from redraft.cli.measuring import Output, describe_machine, load, probe_machine, show
from redraft.errors import RedraftError, UsageError
from redraft.tables import Table

if TYPE_CHECKING:
    from redraft.bench.roofline import Measured
    from redraft.bench.step import StepResult

app = options.group(
    "Measure speed: of whole passes, of batches and of single kernels. docs/bench.md explains every figure."
)


@app.command("step")
@options.grouped
def step(
    *, model: options.Model,
    vs: Annotated[
        str | None,
        typer.Option("--vs", metavar="NAMES", help="Compare with transformers, transformers-compiled or both."),
    ] = None,
    prompt_tokens: options.PromptTokens = 1024, batch: options.Batch = 1,
    slots: Annotated[
        int, typer.Option("--slots", metavar="N", min=0, help="Slots that the batch is in; 0: as many as canvases.")
    ] = 0,
    passes: options.Passes = 16, rounds: options.Rounds = 5, loading: options.Loading, output: Output,
) -> None:  # fmt: skip
    """Time a denoising pass, whole and by part, beside other implementations in the same process."""
    import torch

    from redraft.bench.rivals import parse_rivals, rivals
    from redraft.bench.step import bench_step

    names = parse_rivals(vs)
    output.check()
    subject = load(model, loading)
    engine, roofline = subject.engine, subject.limits.roofline
    about: dict[str, Any] = {"prompt_tokens": prompt_tokens, "batch": batch, "passes": passes, "rounds": rounds}
    others = rivals(names, engine, batch, prompt_tokens)
    try:
        with working("warming up") as status:
            result = bench_step(engine, subject.limits, **about, slots=slots, rivals=others, progress=status.update)
    except torch.OutOfMemoryError:
        raise RedraftError(f"{engine.device} ran out of memory; use fewer canvases or a shorter prompt") from None
    print_step(result)
    title = f"{model}, {batch} canvases, prompt {prompt_tokens}"
    output.draw(roofline, {**result.parts, "pass": result.total}, title)
    output.print({**subject.describe(), **about, "slots": max(slots, batch), **result.to_dict()})
    for name, reason in result.failed.items():
        raise RedraftError(f"{name} could not be measured: {reason}")


@app.command("batch")
@options.grouped
def batch(
    *, model: options.Model,
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="N,N,...", help="Batch sizes, in canvases.")
    ] = "1,2,4,8,16,32",
    prompt_tokens: options.PromptTokens = 1024, passes: options.Passes = 4, rounds: options.Rounds = 3,
    loading: options.Loading, output: Output,
) -> None:  # fmt: skip
    """Time passes of growing batches."""
    from redraft.bench.batch import bench_batch

    chosen = options.numbers("--sizes", sizes, "numbers of canvases")
    output.check()
    subject = load(model, loading)
    about: dict[str, Any] = {"prompt_tokens": prompt_tokens, "passes": passes, "rounds": rounds}
    with working("timing batches"):
        results = list(bench_batch(subject.engine, subject.limits, **about, sizes=chosen))
    figures = [result.to_dict() for result in results]
    _print_batches(figures)
    points = {f"{result.canvases} canvases": result.measured for result in results if result.measured}
    output.draw(subject.limits.roofline, points, f"{model}, prompt {prompt_tokens}")
    output.print({**subject.describe(), **about, "batches": figures})


@app.command("serve-loop")
@options.grouped
def serve_loop(
    *, model: options.Model,
    rates: Annotated[
        str, typer.Option("--rates", metavar="R,R,...", help="Requests a second; inf is all of them at once.")
    ] = "1,2,4,8,inf",
    requests: Annotated[int, typer.Option("--requests", metavar="N", min=1, help="Requests at each rate.")] = 32,
    slots: Annotated[int, typer.Option("--slots", metavar="N", min=1, help="Requests side by side at most.")] = 16,
    prompt_tokens: options.PromptTokens = 1024,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Tokens of every answer.")
    ] = 256,
    passes: options.Passes = 12, seed: options.Seed = 0, loading: options.Loading, json_output: options.Json = False,
) -> None:  # fmt: skip
    """Serve requests that arrive as a Poisson stream: throughput, and seconds to the first draft and to the answer."""
    from redraft.bench.serve_loop import Load, bench_serve_loop
    from redraft.device import environment
    from redraft.network.arena import check_context

    chosen = _rates(rates)
    engine = loading.engine(model)
    load = Load(requests, prompt_tokens, max_new_tokens, passes, slots, seed)
    check_context(engine.config, prompt_tokens, max_new_tokens)
    with working("warming up") as status:
        results = [result.to_dict() for result in bench_serve_loop(engine, load, chosen, status.update)]
    _print_rates(results)
    about = {**describe(engine, model), **vars(load), "environment": environment(engine.device)}
    if json_output:
        print_json({**about, "rates": results})


@app.command("kernels")
@options.grouped
def kernels(
    *, only: options.Only = None, batch: options.Batch = 1, prompt_tokens: options.PromptTokens = 1024,
    compile_stock: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Also time torch.compile, where it makes sense.")
    ] = True,
    seed: options.Seed = 0, device: options.Device = None, output: Output,
) -> None:  # fmt: skip
    """Check every kernel against its reference and time those that are right; without a GPU, only check.

    Exit code 1 if one is wrong.
    """
    from redraft.bench.kernels import bench_kernels, scale_for, select_cases, use_interpreter
    from redraft.device import pick_device

    target = pick_device(device)
    output.check()
    if target.type != "cuda":
        use_interpreter()
    cases, scale = select_cases(only), scale_for(target, batch, prompt_tokens)
    limits = probe_machine(target) if target.type == "cuda" else None
    roofline = limits.roofline if limits else None
    results = []
    with working("checking kernels") as status:
        for result in bench_kernels(cases, scale, seed=seed, compile_stock=compile_stock):
            results.append(result)
            status.update(f"{result.name} done")
    rows = [result.to_dict(roofline) for result in results]
    _print_kernels(rows, timed=roofline is not None)
    if limits and roofline:
        points = {result.name: measured for result in results if (measured := result.measured(roofline))}
        output.draw(roofline, points, f"{limits.device}, {scale.rows} rows")
    about = {"rows": scale.rows, "prefix": scale.prefix, "seed": seed}
    output.print({**about, "kernels": rows, **describe_machine(limits, target)})
    wrong = [result.name for result in results if not result.gate.passed]
    if wrong:
        raise RedraftError(f"{len(wrong)} of {len(results)} kernels are wrong: {', '.join(wrong)}")


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(rate > 0 for rate in rates):  # NaN is not either
        raise UsageError(f"--rates is {text!r}, expected requests a second such as 1,4,inf")
    return rates


def print_step(result: StepResult) -> None:
    """Tables of a pass: implementations, then our parts."""
    from redraft.bench.step import OURS

    roofline, pass_ms = result.total.roofline, result.pass_ms
    arms = []
    for name, timing in result.arms.items():
        label = f"{name} ({result.details[name]['implementation']})"
        times = "" if name == OURS else f"{timing.median / pass_ms:.2f}x"
        arms.append((label, f"{timing.median:.3f}", f"{timing.low:.3f} to {timing.high:.3f}", times))
    arms += [(name, "failed", "", "") for name in result.failed]
    rows = [_row(name, part, f"{part.ms / pass_ms:.1%}") for name, part in result.parts.items()]
    rows.append(("gaps", f"{result.gaps_ms:.3f}", f"{result.gaps_ms / pass_ms:.1%}"))
    rows += [_row("whole pass", result.total, "100.0%"), _row("encode of the prompt", result.encode, "")]
    columns = ("part", "ms", "% of pass", "MB", "GB/s", "TFLOP/s", "floor ms", "% of roofline")
    show(
        Table(("implementation", "ms per pass", "10 % to 90 %", "redraft is faster by"), arms),
        Table(columns, rows),
        f"weights {result.weight_bytes / 2**30:.2f} GiB, peak {result.peak_bytes / 2**30:.2f} GiB; "
        f"roofline measured in this run: {roofline.gbps:,.0f} GB/s, {roofline.tflops:,.2f} TFLOP/s",
    )


def _row(name: str, part: Measured, share_of_pass: str) -> Sequence[str]:
    rates = (f"{part.gbps:,.1f}", f"{part.tflops:,.3f}", f"{part.floor_ms:.3f}", f"{part.share:.1%}")
    return name, f"{part.ms:.3f}", share_of_pass, f"{part.work.bytes / 1e6:,.1f}", *rates


def _print_batches(figures: list[dict[str, Any]]) -> None:
    rows = []
    for row in figures:
        cells = (row["error"],) if "error" in row else (
            f"{row['ms_per_pass']:.3f}", f"{row['ms_per_pass_and_canvas']:.3f}", f"{row['gbps']:,.1f}",
            f"{row['tflops']:,.3f}", f"{row['share_of_roofline']:.1%}", f"{row['peak_bytes'] / 2**30:.2f}",
        )  # fmt: skip
        rows.append((row["canvases"], *cells))
    columns = ("canvases", "ms per pass", "ms per canvas", "GB/s", "TFLOP/s", "% of roofline", "peak GiB")
    show(Table(columns, rows))


def _print_rates(figures: list[dict[str, Any]]) -> None:
    rows = []
    for row in figures:
        first, answer = (row[name] for name in ("first_draft_seconds", "answer_seconds"))
        rows.append((
            "at once" if row["rate"] is None else f"{row['rate']:g}", f"{row['requests_per_second']:.2f}",
            f"{row['tokens_per_second']:,.1f}", f"{first['p50']:.3f} / {first['p90']:.3f}",
            f"{answer['p50']:.3f} / {answer['p90']:.3f}", f"{row['mean_requests_per_pass']:.2f}", row["passes"],
        ))  # fmt: skip
    columns = ("arrivals a second", "answers/s", "tok/s", "first draft s p50 / p90", "answer s p50 / p90")
    show(Table((*columns, "requests a pass", "passes"), rows))


def _print_kernels(figures: list[dict[str, Any]], timed: bool) -> None:
    rows = []
    for row in figures:
        tolerance = "" if row["tolerance"] is None else f"{row['tolerance']:.1e}"
        cells = [row["kernel"], "yes" if row["passed"] else f"NO: {row['reason']}", f"{row['error']:.1e}", tolerance]
        if "us" in row:
            cells += [f"{row['us']:.1f}", f"{row['gbps']:,.0f}", f"{row['share_of_roofline']:.1%}"]
            cells += ["" if row[k] is None else f"{row[k]:.1f}" for k in ("torch_us", "compiled_us")]
        rows.append(cells)
    columns = ("kernel", "correct", "error", "tolerance", "us", "GB/s", "% of roofline", "torch us", "compiled us")
    show(Table(columns if timed else columns[:4], rows))
    if not timed:
        show("No GPU: Triton's interpreter checked small shapes; there are no speeds to report.")
