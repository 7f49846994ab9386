"""`redraft quantize SRC DST`: pack the experts of a BF16 checkpoint into 4 bits."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from redraft.cli.options import Device, Json
from redraft.cli.writing import print_report, with_progress
from redraft.config import QuantSpec


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
    from redraft.device import pick_device
    from redraft.quant.quantize import quantize

    target = pick_device(device)
    report = with_progress(
        "quantising",
        dst,
        lambda progress: quantize(src, dst, spec, overwrite=overwrite, device=target, progress=progress),
    )
    if json_output:
        print(json.dumps({**report.to_dict(), "destination": dst}))
    else:
        print_report(report, dst)
