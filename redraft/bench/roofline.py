"""The roofline: work of given bytes and operations takes at least max(bytes / bandwidth, operations / rate).

Both limits are measured on the device in the same run (`probe.py`), never taken from a data sheet.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redraft.errors import RedraftError, UsageError


@dataclass(frozen=True)
class Work:
    """Bytes that must move to or from memory and floating point operations that must be done."""

    bytes: float
    flops: float

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

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

    def share(self, work: Work, ms: float) -> float:
        """Floor over time: 1 is the limit. Above 1 the data came from a cache."""
        return self.floor_ms(work) / ms


@dataclass(frozen=True)
class Point:
    """Something timed, for the plot."""

    name: str
    work: Work
    ms: float

    @property
    def gbps(self) -> float:
        return self.work.bytes / (self.ms * 1e6)


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


def plot_roofline(path: Path, roofline: Roofline, points: Sequence[Point], title: str) -> None:
    """Draw measured limits and every point.

    Copies, which compute nothing, stand at the left edge, as far below the line as their bandwidth is.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    low = min([0.1, *(p.work.intensity / 2 for p in points if p.work.flops)])
    high = max([roofline.ridge * 10, *(p.work.intensity * 2 for p in points)])
    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    axes.plot([low, roofline.ridge, high], [low * roofline.gbps / 1e3, roofline.tflops, roofline.tflops], color="black")
    for point in points:
        x = point.work.intensity or low
        y = x * point.gbps / 1e3
        (dot,) = axes.plot(x, y, "o")
        label = f"{point.name}: {roofline.share(point.work, point.ms):.0%}"
        axes.annotate(
            label, (x, y), xytext=(5, 3), textcoords="offset points", fontsize=8,
            color=dot.get_color(),
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s", title=title)
    axes.grid(True, which="both", alpha=0.2)
    axes.text(
        0.02, 0.97, f"measured: {roofline.gbps:,.0f} GB/s, {roofline.tflops:,.1f} TFLOP/s, ridge {roofline.ridge:,.0f}",
        transform=axes.transAxes, va="top",
    )  # fmt: skip
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib, whole or not at all, and close it."""
    from matplotlib import pyplot

    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=path.suffix, delete=False) as file:
            partial = Path(file.name)
        try:
            figure.savefig(partial, dpi=150)
            os.chmod(partial, 0o666 & ~_umask())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    finally:
        pyplot.close(figure)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
