"""`redraft merge-lora BASE ADAPTER DST`: a checkpoint with a LoRA adapter merged into its weights."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from redraft.cli.options import Json
from redraft.cli.writing import Overwrite, Target, write

if TYPE_CHECKING:
    from redraft.quant.lora import MergeReport


def command(
    base: Annotated[str, typer.Argument(metavar="BASE", help="A BF16 checkpoint: a directory, a hub id, or 'demo'.")],
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="A PEFT LoRA adapter: a directory or a hub id.")],
    dst: Target,
    both_sides: Annotated[bool, typer.Option(
        "--both-sides", help="Merge what ADAPTER has on one side into weights both sides share."
    )] = False,
    overwrite: Overwrite = False, json_output: Json = False,
) -> None:  # fmt: skip
    """Write BASE to DST with ADAPTER merged: sums in fp32, rounded to BASE's dtype; all else is kept as it is.

    Anything of the adapter that cannot be merged is an error, and nothing is written.
    """
    from redraft.quant.lora import merge_lora

    merge = partial(merge_lora, base, adapter, dst, both_sides=both_sides, overwrite=overwrite)
    write("merging", dst, json_output, merge, _show)


def _show(report: MergeReport, dst: str) -> None:
    from redraft.cli.common import output_console
    from redraft.tables import Table

    console = output_console()
    kinds = Counter((t.name.removesuffix(".weight").rsplit(".", 1)[-1], t.rank, t.scale) for t in report.tensors)
    rows = [(name, str(rank), f"{scale:g}", str(count)) for (name, rank, scale), count in kinds.items()]
    console.print(Table(("projection", "rank", "scale", "weights"), rows, "Merged"))
    for note in report.notes:
        console.print(f"note: {note}")
    console.print(f"{dst}: {report.adapter} merged into {len(report.tensors)} weights of {report.base}")
