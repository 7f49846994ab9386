"""Charts of a comparison, PNG files beside its report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redraft.bench.roofline import save_figure
from redraft.evaluate.report import overall
from redraft.evaluate.run import Record


def draw_charts(folder: Path, report: dict[str, Any], records: Sequence[Record]) -> list[str]:
    """Draw every chart into `folder`; returns the file names."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms = [arm["name"] for arm in report["arms"]]
    for draw in (charts := (accuracy, speed, answer_time, steps_and_lengths)):
        wide = draw is steps_and_lengths
        figure, axes = pyplot.subplots(1, 2 if wide else 1, figsize=(10 if wide else 8, 4.5), layout="constrained")
        draw(axes, report, records, arms)
        figure.suptitle(f"{report['model']}: {report['device_name']}", fontsize=10)
        save_figure(figure, folder / f"{draw.__name__}.png")
    return [f"{draw.__name__}.png" for draw in charts]


def accuracy(axes: Any, report: dict[str, Any], records: Sequence[Record], arms: list[str]) -> None:
    """Bars by task with Wilson's intervals."""
    scopes = list(report["results"][arms[0]])
    width = 0.8 / len(arms)
    for place, arm in enumerate(arms):
        figures = [report["results"][arm][scope] for scope in scopes]
        middle = [100 * f["accuracy"] for f in figures]
        spans = [[100 * abs(f["accuracy"] - f["interval"][end]) for f in figures] for end in (0, 1)]
        at = [i + (place - (len(arms) - 1) / 2) * width for i in range(len(scopes))]
        axes.bar(at, middle, 0.9 * width, yerr=spans, capsize=3, label=arm)
    axes.set_xticks(range(len(scopes)), scopes)
    noise = " (random weights: means nothing)" if report["random_weights"] else ""
    axes.set(ylim=(0, 105), ylabel="right, %", title=f"Accuracy with 95 % intervals{noise}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def speed(axes: Any, report: dict[str, Any], records: Sequence[Record], arms: list[str]) -> None:
    """Every answer's rate, their mean and the aggregate."""
    for place, arm in enumerate(arms):
        rates = [r.tokens / r.seconds for r in records if r.arm == arm]
        spread = [place + 0.3 * ((i * 0.618) % 1 - 0.5) for i in range(len(rates))]
        axes.plot(spread, rates, ".", alpha=0.3, color=f"C{place}")
        figures = overall(report["results"][arm])
        for key, style, label in (("", "-", "aggregate"), ("request_", ":", "mean per request")):
            rate, shown = figures[f"{key}tokens_per_second"], None if place else label
            axes.hlines(rate, place - 0.4, place + 0.4, colors="black", linestyles=style, label=shown)
    axes.set_xticks(range(len(arms)), arms)
    axes.set(ylim=(0, None), ylabel="tokens per second", title="Speed, a dot per answer")
    axes.legend()


def answer_time(axes: Any, report: dict[str, Any], records: Sequence[Record], arms: list[str]) -> None:
    """Share of answers that were there after so many seconds."""
    for arm in arms:
        axes.ecdf([r.seconds for r in records if r.arm == arm], label=arm)
    axes.set(xlabel="seconds to the answer", ylabel="share of answers", title="Time to answer", xlim=(0, None))
    axes.legend(loc="lower right")


def steps_and_lengths(both: Any, report: dict[str, Any], records: Sequence[Record], arms: list[str]) -> None:
    """Boxes from the 10th to the 90th percentile's whiskers, outliers as points."""
    steps = [[s for r in records if r.arm == arm for s in r.steps_per_canvas] for arm in arms]
    lengths = [[r.tokens for r in records if r.arm == arm] for arm in arms]
    for axes, values, label in zip(both, (steps, lengths), ("steps per canvas", "tokens per answer"), strict=True):
        axes.boxplot(values, whis=(10, 90), showmeans=True, tick_labels=arms)
        axes.set(ylim=(0, None), title=label.capitalize(), ylabel=label)
        axes.tick_params(axis="x", rotation=15)
