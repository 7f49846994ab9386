"""`redraft export SRC DST`: write a checkpoint that other programs read."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from redraft.cli.options import Device, Json
from redraft.cli.writing import print_report, with_progress
from redraft.config import check_choice
from redraft.errors import UsageError

FORMATS = ("compressed-tensors",)
GROUP_SIZE = 64


def command(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="A checkpoint: a directory, a hub id, or 'demo'; BF16, or packed for --remote-code."
        ),
    ],
    dst: Annotated[str, typer.Argument(metavar="DST", help="The directory to write; it must be new or empty.")],
    format_name: Annotated[
        str | None, typer.Option("--format", metavar="|".join(FORMATS), help="What to write from a BF16 SRC.")
    ] = None,
    remote_code: Annotated[
        bool,
        typer.Option("--remote-code", help="Write a packed SRC with code that transformers runs without Redraft."),
    ] = False,
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size", metavar="64|32", help="Weights per scale, 64 by default; 32 also splits over two GPUs."
        ),
    ] = None,
    symmetric: Annotated[
        bool, typer.Option("--symmetric", help="No zero points: less accurate, and all that vLLM's expert layers take.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that DST holds.")] = False,
    device: Device = None,
    json_output: Json = False,
) -> None:
    """Write SRC to DST, with each expert's projections packed in 4 bits (--format), or with its code (--remote-code).

    Interrupted or out of disk space, the same command resumes after the last finished layer.
    """
    if remote_code == (format_name is not None):
        raise UsageError(f"give either --remote-code or --format {'|'.join(FORMATS)}")
    if format_name is None:
        if group_size is not None or symmetric:
            raise UsageError("--group-size and --symmetric go with --format; --remote-code keeps how SRC is packed")
        _with_code(src, dst, overwrite, json_output)
        return
    check_choice("format", format_name, FORMATS)
    from redraft.device import pick_device
    from redraft.quant.quantize import export_compressed_tensors

    target = pick_device(device)
    report = with_progress(
        "exporting",
        dst,
        lambda progress: export_compressed_tensors(
            src,
            dst,
            group=GROUP_SIZE if group_size is None else group_size,
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


def _with_code(src: str, dst: str, overwrite: bool, json_output: bool) -> None:
    from redraft.quant.remote_code import AUTO_MAP, export_remote_code

    written = with_progress(
        "exporting", dst, lambda progress: export_remote_code(src, dst, overwrite=overwrite, progress=progress)
    )
    if json_output:
        print(json.dumps({"modules": written.modules, "bytes": written.bytes, "destination": dst}))
        return
    print(f"{dst}: {written.bytes / 1e6:,.1f} MB of weights and {len(written.modules)} modules of code; load it with")
    print(f'{next(iter(AUTO_MAP))}.from_pretrained("{dst}", trust_remote_code=True, tier="turbo")')
