"""`redraft merge-lora BASE ADAPTER DST`: a checkpoint with a LoRA adapter merged into its weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from redraft.cli.options import Json
from redraft.cli.writing import with_progress

if TYPE_CHECKING:
    from redraft.quant.lora import MergeReport


def command(
    base: Annotated[str, typer.Argument(metavar="BASE", help="A BF16 checkpoint: a directory, a hub id, or 'demo'.")],
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="A PEFT LoRA adapter: a directory or a hub id.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="The directory to write; it must be new or empty.")],
    both_sides: Annotated[
        bool, typer.Option("--both-sides", help="Merge what ADAPTER has on one side into weights both sides share.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that DST holds.")] = False,
    json_output: Json = False,
) -> None:
    """Write BASE to DST with ADAPTER merged: sums in fp32, rounded to BASE's dtype; all else is kept as it is.

    Anything of the adapter that cannot be merged is an error, and nothing is written.
    """
    from redraft.quant.lora import merge_lora

    report = with_progress(
        "merging",
        dst,
        lambda progress: merge_lora(base, adapter, dst, both_sides=both_sides, overwrite=overwrite, progress=progress),
    )
    if json_output:
        print(json.dumps({**report.to_dict(), "destination": dst}))
    else:
        _print(report, dst)


def _print(report: MergeReport, dst: str) -> None:
    from rich.console import Console
    from rich.table import Table

    rows: dict[tuple[str, int, float], int] = {}
    for tensor in report.tensors:
        key = (tensor.name.removesuffix(".weight").rsplit(".", 1)[-1], tensor.rank, tensor.scale)
        rows[key] = rows.get(key, 0) + 1
    console = Console(highlight=False)
    table = Table("projection", "rank", "scale", "weights", title="Merged")
    for (projection, rank, scale), count in rows.items():
        table.add_row(projection, str(rank), f"{scale:g}", str(count))
    console.print(table)
    for note in report.notes:
        console.print(f"note: {note}")
    console.print(f"{dst}: {report.adapter} merged into {len(report.tensors)} weights of {report.base}")
