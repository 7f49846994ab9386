"""What the commands that measure share: the machine's limits beside the engine, tables, the plot, the JSON line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redraft.cli import options
from redraft.cli.common import describe, output_console, print_json, working
from redraft.tables import Table

if TYPE_CHECKING:
    import torch

    from redraft.bench.probe import Probe
    from redraft.bench.roofline import Measured, Roofline
    from redraft.engine.engine import Engine


@dataclass(frozen=True)
class Output:
    """What is made of the figures beside tables."""

    plot: options.Plot = None
    json_output: options.Json = False

    def check(self) -> None:
        """Before anything is measured: the plot can be drawn. Raises RedraftError."""
        if self.plot is not None:
            from redraft.bench.roofline import check_plot

            check_plot(self.plot)

    def draw(self, roofline: Roofline, points: Mapping[str, Measured], title: str) -> None:
        if self.plot is not None:
            from redraft.bench.roofline import plot_roofline

            plot_roofline(self.plot, roofline, points, title)

    def print(self, values: dict[str, Any]) -> None:
        if self.json_output:
            print_json(values)


@dataclass(frozen=True)
class Subject:
    """What is measured, and the limits of the machine that it is on."""

    model: str
    engine: Engine
    limits: Probe

    def describe(self) -> dict[str, Any]:
        return {**describe(self.engine, self.model), **describe_machine(self.limits, self.engine.device)}


def load(model: str, loading: options.Loading) -> Subject:
    """The engine, and the machine's limits with it in memory."""
    engine = loading.engine(model)
    return Subject(model, engine, probe_machine(engine.device))


def probe_machine(device: torch.device) -> Probe:
    from redraft.bench.probe import probe

    with working("measuring the machine"):
        return probe(device)


def describe_machine(limits: Probe | None, device: torch.device) -> dict[str, Any]:
    from redraft.device import environment

    return {"probe": limits and limits.to_dict(), "environment": environment(device)}


def show(*parts: Table | str) -> None:
    """Print tables and lines."""
    console = output_console()
    for part in parts:
        console.print(part)
