"""Charts of a comparison, PNG files beside its report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redraft.bench.roofline import save_figure
from redraft.evaluate.report import overall
from redraft.evaluate.run import Record

Answers = dict[str, list[Record]]  # by arm


def draw_charts(folder: Path, report: dict[str, Any], records: Sequence[Record]) -> list[str]:
    """Draw every chart into `folder`; returns the file names."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    answers = {arm["name"]: [r for r in records if r.arm == arm["name"]] for arm in report["arms"]}
    charts = {f"{draw.__name__}.png": draw for draw in (accuracy, speed, answer_time, steps_and_lengths)}
    for name, draw in charts.items():
        columns = 2 if draw is steps_and_lengths else 1
        figure, axes = pyplot.subplots(1, columns, figsize=(6 + 2 * columns, 4.5), layout="constrained")
        draw(axes, report, answers)
        figure.suptitle(f"{report['model']}: {report['device_name']}", fontsize=10)
        save_figure(figure, folder / name)
    return list(charts)


def accuracy(axes: Any, report: dict[str, Any], answers: Answers) -> None:
    """Bars by task with Wilson's intervals."""
    scopes, width = list(next(iter(report["results"].values()))), 0.8 / len(answers)
    for place, arm in enumerate(answers):
        figures = [report["results"][arm][scope] for scope in scopes]
        spans = [[100 * abs(f["accuracy"] - f["interval"][end]) for f in figures] for end in (0, 1)]
        at = [i + (place - (len(answers) - 1) / 2) * width for i in range(len(scopes))]
        axes.bar(at, [100 * f["accuracy"] for f in figures], 0.9 * width, yerr=spans, capsize=3, label=arm)
    axes.set_xticks(range(len(scopes)), scopes)
    noise = " (random weights: means nothing)" if report["random_weights"] else ""
    axes.set(ylim=(0, 105), ylabel="right, %", title=f"Accuracy with 95 % intervals{noise}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def speed(axes: Any, report: dict[str, Any], answers: Answers) -> None:
    """Every answer's rate, their mean and the aggregate."""
    for place, (arm, records) in enumerate(answers.items()):
        spread = [place + 0.3 * ((i * 0.618) % 1 - 0.5) for i in range(len(records))]
        axes.plot(spread, [r.tokens / r.seconds for r in records], ".", alpha=0.3, color=f"C{place}")
        figures = overall(report["results"][arm])
        for key, style, label in (("", "-", "aggregate"), ("request_", ":", "mean per request")):
            rate, shown = figures[f"{key}tokens_per_second"], None if place else label
            axes.hlines(rate, place - 0.4, place + 0.4, colors="black", linestyles=style, label=shown)
    axes.set_xticks(range(len(answers)), answers)
    axes.set(ylim=(0, None), ylabel="tokens per second", title="Speed, a dot per answer")
    axes.legend()


def answer_time(axes: Any, report: dict[str, Any], answers: Answers) -> None:
    """Share of answers that were there after so many seconds."""
    for arm, records in answers.items():
        axes.ecdf([r.seconds for r in records], label=arm)
    axes.set(xlabel="seconds to the answer", ylabel="share of answers", title="Time to answer", xlim=(0, None))
    axes.legend(loc="lower right")


def steps_and_lengths(both: Any, report: dict[str, Any], answers: Answers) -> None:
    """Boxes from the 10th to the 90th percentile's whiskers, outliers as points."""
    steps = [[step for r in records for step in r.steps_per_canvas] for records in answers.values()]
    lengths = [[r.tokens for r in records] for records in answers.values()]
    for axes, values, label in zip(both, (steps, lengths), ("steps per canvas", "tokens per answer"), strict=True):
        axes.boxplot(values, whis=(10, 90), showmeans=True, tick_labels=list(answers))
        axes.set(ylim=(0, None), title=label.capitalize(), ylabel=label)
        axes.tick_params(axis="x", rotation=15)
