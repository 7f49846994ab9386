"""The roofline: work of given bytes and operations takes at least max(bytes / bandwidth, operations / rate).

Both limits are measured on the device in the same run (`probe.py`), never taken from a data sheet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redraft.bench.timing import Timing
from redraft.errors import RedraftError, UsageError
from redraft.files import replacing


@dataclass(frozen=True)
class Work:
    """Bytes that must move to or from memory and floating point operations that must be done."""

    bytes: float
    flops: float

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def __mul__(self, times: float) -> Work:
        return Work(self.bytes * times, self.flops * times)

    @classmethod
    def total(cls, works: Iterable[Work]) -> Work:
        return sum(works, cls(0, 0))

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes


@dataclass(frozen=True)
class Roofline:
    """A device's measured limits: GB/s of memory, TFLOP/s of matrix products in the dtype that is used."""

    gbps: float
    tflops: float

    @property
    def ridge(self) -> float:
        """Operations per byte from which on arithmetic is the limit."""
        return self.tflops * 1e3 / self.gbps

    def floor_ms(self, work: Work) -> float:
        return max(work.bytes / (self.gbps * 1e6), work.flops / (self.tflops * 1e9))


@dataclass(frozen=True)
class Measured:
    """Work, the time that it took, and the limits that both are held against: every figure of a timing."""

    work: Work
    timing: Timing
    roofline: Roofline

    @property
    def ms(self) -> float:
        return self.timing.median

    @property
    def gbps(self) -> float:
        return self.work.bytes / self.ms / 1e6

    @property
    def tflops(self) -> float:
        return self.work.flops / self.ms / 1e9

    @property
    def floor_ms(self) -> float:
        return self.roofline.floor_ms(self.work)

    @property
    def share(self) -> float:
        """Floor over time: 1 is the limit. Above 1 the data came from a cache."""
        return self.floor_ms / self.ms

    def rates(self) -> dict[str, float]:
        """What the time means, without the time."""
        return {
            "bytes": self.work.bytes, "flops": self.work.flops, "gbps": self.gbps, "tflops": self.tflops,
            "floor_ms": self.floor_ms, "share_of_roofline": self.share,
        }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return {**self.timing.to_dict(), **self.rates()}


PLOT_KINDS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Before anything is measured: matplotlib is there, the kind is known, the folder exists."""
    if path.suffix.lower() not in PLOT_KINDS:
        raise UsageError(f"{path}: a plot is one of {', '.join(PLOT_KINDS)}, by the file's name")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: no such directory; make it first or plot elsewhere")
    check_matplotlib("--plot")


def check_matplotlib(who: str) -> None:
    """Raise RedraftError when `who` cannot draw."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RedraftError(f"{who} needs matplotlib, which is not installed: pip install 'redraft[plot]'") from None


def plot_roofline(path: Path, roofline: Roofline, points: Mapping[str, Measured], title: str) -> None:
    """Draw measured limits and every point.

    Copies, which compute nothing, stand at the left edge, as far below the line as their bandwidth is.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    works = [point.work for point in points.values()]
    low = min([0.1, *(work.intensity / 2 for work in works if work.flops)])
    high = max([roofline.ridge * 10, *(work.intensity * 2 for work in works)])
    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    axes.plot([low, roofline.ridge, high], [low * roofline.gbps / 1e3, roofline.tflops, roofline.tflops], color="black")
    for name, point in points.items():
        x = point.work.intensity or low
        at, label = (x, x * point.gbps / 1e3), f"{name}: {point.share:.0%}"
        (dot,) = axes.plot(*at, "o")
        axes.annotate(label, at, xytext=(5, 3), textcoords="offset points", fontsize=8, color=dot.get_color())
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s", title=title)
    axes.grid(True, which="both", alpha=0.2)
    limits = f"{roofline.gbps:,.0f} GB/s, {roofline.tflops:,.1f} TFLOP/s, ridge {roofline.ridge:,.0f}"
    axes.text(0.02, 0.97, f"measured: {limits}", transform=axes.transAxes, va="top")
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib, whole or not at all, and close it."""
    from matplotlib import pyplot

    try:
        with replacing(path) as file:
            figure.savefig(file.name, format=path.suffix[1:].lower(), dpi=150)
    finally:
        pyplot.close(figure)
