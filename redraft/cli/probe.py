"""`redraft probe`: what this machine can do at most."""

from redraft.cli import options
from redraft.cli.measuring import Output, probe_machine, show
from redraft.tables import Table


@options.grouped
def command(*, device: options.Device = None, output: Output) -> None:
    """Measure memory bandwidth, matrix products and launch cost: the limits that every speed is held against."""
    from redraft.device import environment, pick_device

    target = pick_device(device)
    output.check()
    result = probe_machine(target)
    rows = [("memory, copy", f"{result.copy_gbps:,.0f} GB/s"), ("memory, read", f"{result.read_gbps:,.0f} GB/s")]
    for name, rate in result.matmul_tflops.items():
        rows.append((f"matrix product, {name}", f"{rate:,.3f} TFLOP/s"))
        rows.append(("  ridge", f"{result.ridges[name]:,.0f} FLOP/byte"))
    rows.append(("launch of a tiny kernel", f"{result.launch_us:.2f} us"))
    if result.graph_launch_us is not None:
        rows.append(("the same in a CUDA graph", f"{result.graph_launch_us:.2f} us"))
    show(Table(("limit", "measured"), rows, result.device))
    output.draw(result.roofline, {}, f"{result.device}, {result.roofline_dtype}")
    output.print({**result.to_dict(), "environment": environment(target)})
