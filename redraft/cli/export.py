"""`redraft export SRC DST`: write a checkpoint that other programs read."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from redraft.cli.options import Device, Json
from redraft.cli.writing import Overwrite, Target, show_packed, write
from redraft.config import check_choice
from redraft.errors import UsageError

if TYPE_CHECKING:
    from redraft.quant.remote_code import RemoteCode

FORMATS = ("compressed-tensors",)
GROUP_SIZE = 64


def command(
    src: Annotated[str, typer.Argument(
        metavar="SRC", help="A checkpoint: a directory, a hub id, or 'demo'; BF16, or packed for --remote-code."
    )],
    dst: Target,
    format_name: Annotated[str | None, typer.Option(
        "--format", metavar="|".join(FORMATS), help="What to write from a BF16 SRC."
    )] = None,
    remote_code: Annotated[bool, typer.Option(
        "--remote-code", help="Write a packed SRC with code that transformers runs without Redraft."
    )] = False,
    group_size: Annotated[int | None, typer.Option(
        "--group-size", metavar="64|32", help="Weights per scale, 64 by default; 32 also splits over two GPUs."
    )] = None,
    symmetric: Annotated[bool, typer.Option(
        "--symmetric", help="No zero points: less accurate, and all that vLLM's expert layers take."
    )] = False,
    overwrite: Overwrite = False, device: Device = None, json_output: Json = False,
) -> None:  # fmt: skip
    """Write SRC to DST, with each expert's projections packed in 4 bits (--format), or with its code (--remote-code).

    Interrupted or out of disk space, the same command resumes after the last finished layer.
    """
    if remote_code == (format_name is not None):
        raise UsageError(f"give either --remote-code or --format {'|'.join(FORMATS)}")
    if format_name is None:
        if group_size is not None or symmetric:
            raise UsageError("--group-size and --symmetric go with --format; --remote-code keeps how SRC is packed")
        from redraft.quant.remote_code import export_remote_code

        bundle = partial(export_remote_code, src, dst, overwrite=overwrite)
        write("exporting", dst, json_output, bundle, _show_code)
        return
    check_choice("format", format_name, FORMATS)
    from redraft.device import pick_device
    from redraft.quant.quantize import export_compressed_tensors

    pack = partial(export_compressed_tensors, src, dst, symmetric=symmetric, overwrite=overwrite)
    pack = partial(pack, group=GROUP_SIZE if group_size is None else group_size, device=pick_device(device))
    write("exporting", dst, json_output, pack, show_packed, symmetric=symmetric)


def _show_code(written: RemoteCode, dst: str) -> None:
    from redraft.quant.remote_code import AUTO_MAP

    print(f"{dst}: {written.bytes / 1e6:,.1f} MB of weights and {len(written.modules)} modules of code; load it with")
    print(f'{next(iter(AUTO_MAP))}.from_pretrained("{dst}", trust_remote_code=True, tier="turbo")')
