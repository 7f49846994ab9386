"""`redraft quantize SRC DST`: pack the experts of a BF16 checkpoint into 4 bits."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated

import typer

from redraft.cli.options import Device, Json
from redraft.config import QuantSpec
from redraft.errors import RedraftError

if TYPE_CHECKING:
    from redraft.quant.report import QuantReport


def command(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A BF16 checkpoint: a directory, a hub id, or 'demo'.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="The directory to write; it must be new or empty.")],
    group_gate_up: Annotated[
        int, typer.Option("--group-gate-up", metavar="N", help="Weights per scale in gate and up projections.")
    ] = QuantSpec.group_gate_up,
    group_down: Annotated[
        int, typer.Option("--group-down", metavar="N", help="Weights per scale in down projections.")
    ] = QuantSpec.group_down,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that DST holds.")] = False,
    device: Device = None,
    json_output: Json = False,
) -> None:
    """Write SRC to DST with its experts in 4 bits; everything else is kept as it is.

    Interrupted or out of disk space, the same command resumes after the last finished layer.
    """
    spec = QuantSpec(group_gate_up, group_down)
    report = _run(src, dst, spec, overwrite, device)
    if json_output:
        print(json.dumps({**report.to_dict(), "destination": dst}))
    else:
        _print_report(report, dst)


def _run(src: str, dst: str, spec: QuantSpec, overwrite: bool, device: str | None) -> QuantReport:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from redraft.device import pick_device
    from redraft.quant.quantize import quantize
    from redraft.quant.workdir import partial_path

    target = pick_device(device)
    columns = (TextColumn("quantising"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("quantising", total=None)
            return quantize(
                src,
                dst,
                spec,
                overwrite=overwrite,
                device=target,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except KeyboardInterrupt:
        kept = partial_path(dst)
        advice = (
            f"finished layers are kept in {kept}: run the same command to resume, or delete it" if kept.exists() else ""
        )
        raise Interrupted(f"interrupted, {dst} was not written; {advice or 'nothing was kept'}") from None


class Interrupted(RedraftError):
    """Ctrl-C, with the way to go on: 128 + SIGINT."""

    exit_code = 130


def _print_report(report: QuantReport, dst: str) -> None:
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
