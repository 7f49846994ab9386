"""`redraft probe`: what this machine can do at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redraft.cli import options
from redraft.cli.measuring import Output, probe_machine

if TYPE_CHECKING:
    from redraft.bench.probe import Probe


@options.grouped
def command(*, device: options.Device = None, output: Output) -> None:
    """Measure memory bandwidth, matrix products and launch cost: the limits that every speed is held against."""
    from redraft.device import environment, pick_device

    target = pick_device(device)
    output.check()
    result = probe_machine(target)
    _print(result)
    output.draw(result.roofline, {}, f"{result.device}, {result.roofline_dtype}")
    output.print({**result.to_dict(), "environment": environment(target)})


def _print(result: Probe) -> None:
    from redraft.cli.common import output_console
    from redraft.tables import Table

    rows = [("memory, copy", f"{result.copy_gbps:,.0f} GB/s"), ("memory, read", f"{result.read_gbps:,.0f} GB/s")]
    for name, rate in result.matmul_tflops.items():
        rows.append((f"matrix product, {name}", f"{rate:,.3f} TFLOP/s"))
        rows.append(("  ridge", f"{result.ridges[name]:,.0f} FLOP/byte"))
    rows.append(("launch of a tiny kernel", f"{result.launch_us:.2f} us"))
    if result.graph_launch_us is not None:
        rows.append(("the same in a CUDA graph", f"{result.graph_launch_us:.2f} us"))
    output_console().print(Table(("limit", "measured"), rows, result.device))
