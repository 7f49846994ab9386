"""`redraft export SRC DST`: write a checkpoint in a format that other programs read."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from redraft.cli.options import Device, Json
from redraft.cli.writing import print_report, with_progress
from redraft.config import check_choice

FORMATS = ("compressed-tensors",)


def command(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A BF16 checkpoint: a directory, a hub id, or 'demo'.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="The directory to write; it must be new or empty.")],
    format_name: Annotated[str, typer.Option("--format", metavar="|".join(FORMATS), help="What to write.")],
    group_size: Annotated[
        int, typer.Option("--group-size", metavar="64|32", help="Weights per scale; 32 also splits over two GPUs.")
    ] = 64,
    symmetric: Annotated[
        bool, typer.Option("--symmetric", help="No zero points: less accurate, and all that vLLM's expert layers take.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that DST holds.")] = False,
    device: Device = None,
    json_output: Json = False,
) -> None:
    """Write SRC to DST with each expert's projections packed in 4 bits; everything else is kept as it is.

    Interrupted or out of disk space, the same command resumes after the last finished layer.
    """
    check_choice("format", format_name, FORMATS)
    from redraft.device import pick_device
    from redraft.quant.export import export_compressed_tensors

    target = pick_device(device)
    report = with_progress(
        "exporting",
        dst,
        lambda progress: export_compressed_tensors(
            src,
            dst,
            group=group_size,
            symmetric=symmetric,
            overwrite=overwrite,
            progress=progress,
            device=target,
        ),
    )
    if json_output:
        print(json.dumps({**report.to_dict(), "symmetric": symmetric, "destination": dst}))
    else:
        print_report(report, dst)
