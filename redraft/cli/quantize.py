"""`redraft quantize SRC DST`: pack the experts of a BF16 checkpoint into 4 bits."""

from functools import partial
from typing import Annotated

import typer

from redraft.cli.options import Device, Json
from redraft.cli.writing import Bf16Source, Overwrite, Target, show_packed, write
from redraft.config import QuantSpec


def command(
    src: Bf16Source,
    dst: Target,
    group_gate_up: Annotated[int, typer.Option(
        "--group-gate-up", metavar="N", help="Weights per scale in gate and up projections."
    )] = QuantSpec.group_gate_up,
    group_down: Annotated[int, typer.Option(
        "--group-down", metavar="N", help="Weights per scale in down projections."
    )] = QuantSpec.group_down,
    overwrite: Overwrite = False, device: Device = None, json_output: Json = False,
) -> None:  # fmt: skip
    """Write SRC to DST with its experts in 4 bits; everything else is kept as it is.

    Interrupted or out of disk space, the same command resumes after the last finished layer.
    """
    spec = QuantSpec(group_gate_up, group_down)
    from redraft.device import pick_device
    from redraft.quant.quantize import quantize

    pack = partial(quantize, src, dst, spec, overwrite=overwrite, device=pick_device(device))
    write("quantising", dst, json_output, pack, show_packed)
