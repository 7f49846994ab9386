"""`redraft bench`: how fast a model's passes, its batches and single kernels are here."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.cli import options
from redraft.errors import RedraftError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from redraft.bench.batch import BatchResult
    from redraft.bench.kernels import KernelResult
    from redraft.bench.probe import Probe
    from redraft.bench.roofline import Point, Roofline, Work
    from redraft.bench.step import StepResult

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def _group(ctx: typer.Context) -> None:
    """Measure speed: of whole passes, of batches and of single kernels. docs/bench.md explains every figure."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


PromptTokens = Annotated[int, typer.Option("--prompt-tokens", metavar="N", min=1, help="Length of the encoded prompt.")]
Passes = Annotated[int, typer.Option("--passes", metavar="N", min=1, help="Consecutive passes that one sample times.")]
Rounds = Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="Samples of each implementation or size.")]


@app.command("step")
def step(
    model: options.Model,
    vs: Annotated[
        str | None,
        typer.Option("--vs", metavar="NAMES", help="Compare with transformers, transformers-compiled or both."),
    ] = None,
    prompt_tokens: PromptTokens = 1024,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Canvases in a pass.")] = 1,
    passes: Passes = 16,
    rounds: Rounds = 5,
    weights: options.Weights = None,
    tier: options.TierOption = None,
    device: options.Device = None,
    plot: options.Plot = None,
    json_output: options.Json = False,
) -> None:
    """Time a denoising pass, whole and by part, beside other implementations in the same process."""
    from redraft.bench.rivals import parse_rivals, rivals
    from redraft.bench.step import bench_step
    from redraft.cli.common import describe, error_console, print_json, quiet_libraries

    names = parse_rivals(vs)
    engine, limits = _prepare(model, weights, tier, device, plot)
    console = error_console()
    with quiet_libraries(), console.status("warming up") as status, _explain_out_of_memory(engine.device):
        result = bench_step(
            engine,
            limits,
            prompt_tokens=prompt_tokens,
            batch=batch,
            passes=passes,
            rounds=rounds,
            rivals=rivals(names, engine, batch, prompt_tokens),
            progress=status.update,
        )
    print_step(result)
    title = f"{model}, {batch} canvases, prompt {prompt_tokens}"
    _plot(plot, limits.roofline, result.points(), title)
    if json_output:
        about = {"prompt_tokens": prompt_tokens, "batch": batch, "passes": passes, "rounds": rounds}
        print_json({**describe(engine, model), **about, **result.to_dict(), **_machine(limits, engine.device)})
    for name, reason in result.failed.items():
        raise RedraftError(f"{name} could not be measured: {reason}")


@app.command("batch")
def batch(
    model: options.Model,
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="N,N,...", help="Batch sizes, in canvases.")
    ] = "1,2,4,8,16,32",
    prompt_tokens: PromptTokens = 1024,
    passes: Passes = 4,
    rounds: Rounds = 3,
    weights: options.Weights = None,
    tier: options.TierOption = None,
    device: options.Device = None,
    plot: options.Plot = None,
    json_output: options.Json = False,
) -> None:
    """Time passes of growing batches."""
    from redraft.bench.batch import bench_batch
    from redraft.cli.common import describe, error_console, print_json, quiet_libraries

    chosen = _sizes(sizes)
    engine, limits = _prepare(model, weights, tier, device, plot)
    with quiet_libraries(), error_console().status("timing batches"):
        results = list(
            bench_batch(engine, limits, prompt_tokens=prompt_tokens, sizes=chosen, passes=passes, rounds=rounds)
        )
    _print_batches(results)
    points = [point for result in results if (point := result.point())]
    _plot(plot, limits.roofline, points, f"{model}, prompt {prompt_tokens}")
    if json_output:
        about = {"prompt_tokens": prompt_tokens, "passes": passes, "rounds": rounds}
        rows = [result.to_dict() for result in results]
        print_json({**describe(engine, model), **about, "batches": rows, **_machine(limits, engine.device)})


@app.command("kernels")
def kernels(
    only: options.Only = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Canvases in a pass.")] = 1,
    prompt_tokens: PromptTokens = 1024,
    compile_stock: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Also time torch.compile, where it makes sense.")
    ] = True,
    seed: options.Seed = 0,
    device: options.Device = None,
    plot: options.Plot = None,
    json_output: options.Json = False,
) -> None:
    """Check every kernel against its reference and time those that are right; without a GPU, only check.

    Exit code 1 if one is wrong.
    """
    from redraft.bench.kernels import bench_kernels, scale_for, select_cases, use_interpreter
    from redraft.bench.probe import probe
    from redraft.bench.roofline import check_plot
    from redraft.cli.common import error_console, print_json, quiet_libraries
    from redraft.device import environment, pick_device

    target = pick_device(device)
    if plot is not None:
        check_plot(plot)
    if target.type != "cuda":
        use_interpreter()
    cases = select_cases(only)
    scale = scale_for(target, batch, prompt_tokens)
    results = []
    with quiet_libraries(), error_console().status("measuring the machine") as status:
        limits = probe(target) if target.type == "cuda" else None
        for result in bench_kernels(cases, scale, seed=seed, compile_stock=compile_stock):
            results.append(result)
            status.update(f"{result.name} done")
    roofline = limits.roofline if limits else None
    _print_kernels(results, roofline)
    points = [point for result in results if (point := result.point())]
    if roofline:
        _plot(plot, roofline, points, f"{limits.device if limits else ''}, {scale.rows} rows")
    if json_output:
        rows = [result.to_dict(roofline) for result in results]
        machine = _machine(limits, target) if limits else {"environment": environment(target), "probe": None}
        print_json({"rows": scale.rows, "prefix": scale.prefix, "seed": seed, "kernels": rows, **machine})
    wrong = [result.name for result in results if not result.gate.passed]
    if wrong:
        raise RedraftError(f"{len(wrong)} of {len(results)} kernels are wrong: {', '.join(wrong)}")


def _prepare(
    model: str, weights: str | None, tier: str | None, device: str | None, plot: Path | None
) -> tuple[Any, Probe]:
    """The engine and the machine's limits, after everything that can be refused at once was looked at."""
    from redraft.bench.probe import probe
    from redraft.bench.roofline import check_plot
    from redraft.cli.common import error_console, load_engine, quiet_libraries

    if plot is not None:
        check_plot(plot)
    engine = load_engine(model, weights, tier, device)
    with quiet_libraries(), error_console().status("measuring the machine"):
        return engine, probe(engine.device)


@contextmanager
def _explain_out_of_memory(device: torch.device) -> Iterator[None]:
    """One line for torch's message of many."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise RedraftError(f"{device} ran out of memory; use fewer canvases or a shorter prompt") from None


def _machine(limits: Probe, device: torch.device) -> dict[str, Any]:
    from redraft.device import environment

    return {"probe": limits.to_dict(), "environment": environment(device)}


def _plot(path: Path | None, roofline: Roofline, points: Sequence[Point], title: str) -> None:
    from redraft.bench.roofline import plot_roofline

    if path is not None:
        plot_roofline(path, roofline, points, title)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise UsageError(f"--sizes is {text!r}, expected numbers of canvases such as 1,4,16")
    return tuple(map(int, sizes))


def print_step(result: StepResult) -> None:
    """Tables of a pass: implementations, then our parts."""
    from redraft.bench.step import OURS
    from redraft.cli.common import output_console
    from redraft.tables import Table

    console, roofline = output_console(), result.roofline
    arms = []
    for name, timing in result.arms.items():
        label = f"{name} ({result.details[name]['implementation']})"
        times = "" if name == OURS else f"{timing.median / result.pass_ms:.2f}x"
        arms.append((label, f"{timing.median:.3f}", f"{timing.low:.3f} to {timing.high:.3f}", times))
    arms += [(name, "failed", "", "") for name in result.failed]
    console.print(Table(("implementation", "ms per pass", "10 % to 90 %", "redraft is faster by"), arms))
    rows: list[Sequence[str]] = []
    for part in result.parts:
        if part.timing is None:
            rows.append((part.name, f"in {part.within}"))
        else:
            rows.append((part.name, *_cells(part.work, part.timing.median, result.pass_ms, roofline)))
    rows.append(("gaps", f"{result.gaps_ms:.3f}", f"{result.gaps_ms / result.pass_ms:.1%}"))
    rows.append(("whole pass", *_cells(result.total, result.pass_ms, result.pass_ms, roofline)))
    rows.append(("encode of the prompt", *_cells(result.encode_work, result.encode.median, None, roofline)))
    columns = ("part", "ms", "% of pass", "MB", "GB/s", "TFLOP/s", "floor ms", "% of roofline")
    console.print(Table(columns, rows))
    console.print(
        f"weights {result.weight_bytes / 2**30:.2f} GiB, peak {result.peak_bytes / 2**30:.2f} GiB; "
        f"roofline measured in this run: {roofline.gbps:,.0f} GB/s, {roofline.tflops:,.2f} TFLOP/s"
    )


def _cells(work: Work, ms: float, pass_ms: float | None, roofline: Roofline) -> list[str]:
    return [
        f"{ms:.3f}",
        "" if pass_ms is None else f"{ms / pass_ms:.1%}",
        f"{work.bytes / 1e6:,.1f}",
        f"{work.bytes / ms / 1e6:,.1f}",
        f"{work.flops / ms / 1e9:,.3f}",
        f"{roofline.floor_ms(work):.3f}",
        f"{roofline.share(work, ms):.1%}",
    ]


def _print_batches(results: list[BatchResult]) -> None:
    from redraft.cli.common import output_console
    from redraft.tables import Table

    rows: list[Sequence[str]] = []
    for result in results:
        row = result.to_dict()
        if "error" in row:
            rows.append((str(row["canvases"]), row["error"]))
            continue
        rows.append((
            str(row["canvases"]), f"{row['ms_per_pass']:.3f}", f"{row['ms_per_pass_and_canvas']:.3f}",
            f"{row['gbps']:,.1f}", f"{row['tflops']:,.3f}", f"{row['share_of_roofline']:.1%}",
            f"{row['peak_bytes'] / 2**30:.2f}",
        ))  # fmt: skip
    columns = ("canvases", "ms per pass", "ms per canvas", "GB/s", "TFLOP/s", "% of roofline", "peak GiB")
    output_console().print(Table(columns, rows))


def _print_kernels(results: list[KernelResult], roofline: Roofline | None) -> None:
    from redraft.cli.common import output_console
    from redraft.tables import Table

    rows = []
    for result in results:
        row = result.to_dict(roofline)
        tolerance = "" if result.tolerance is None else f"{result.tolerance:.1e}"
        cells = [row["kernel"], "yes" if row["passed"] else f"NO: {row['reason']}", f"{row['error']:.1e}", tolerance]
        if "us" in row:
            cells += [f"{row['us']:.1f}", f"{row['gbps']:,.0f}", f"{row['share_of_roofline']:.1%}"]
            cells += ["" if row[k] is None else f"{row[k]:.1f}" for k in ("torch_us", "compiled_us")]
        rows.append(cells)
    columns = ("kernel", "correct", "error", "tolerance", "us", "GB/s", "% of roofline", "torch us", "compiled us")
    console = output_console()
    console.print(Table(columns if roofline else columns[:4], rows))
    if roofline is None:
        console.print("No GPU: Triton's interpreter checked small shapes; there are no speeds to report.")
