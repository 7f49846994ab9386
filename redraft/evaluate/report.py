"""report.md: the figures of a comparison as a page that says what was measured and how."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from redraft.evaluate.ab_run import WARM_UP_STARTS

LEVEL = 0.05  # below this a McNemar test is called a difference


def order_text(together: bool, why_not: str | None) -> str:
    """What a reader has to know about the order of answers. why_not: why arms were not loaded at once."""
    if together:
        return (
            "All arms were loaded at once and took turns question by question, in the given order for one question and "
            "in the reverse order for the next (AB BA)."
        )
    return (
        f"The order is NOT counterbalanced: {why_not}, so each set of weights answered all questions before the next "
        "was packed in its place or loaded. A machine that warms up or slows down is part of the difference."
    )


def markdown(report: dict[str, Any], charts: Sequence[str]) -> str:
    """The page. `report` is what report.json holds; charts are file names beside it."""
    parts = [
        f"# {report['model']}: {' against '.join(arm['name'] for arm in report['arms'])}",
        *_caveats(report),
        _bullets([verdict(pair, report) for pair in report["comparisons"]]),
        "## Arms\n\n" + _arms(report),
        "## Accuracy\n\n" + _accuracy(report),
        "## Question by question\n\n" + _pairs(report),
        "## Speed\n\n" + _speed(report),
        "## Passes and answers\n\n" + _passes(report),
        "## Time to answer\n\n" + _times(report),
        "## Memory\n\n" + _memory(report),
        "\n".join(f"![{name.removesuffix('.png')}]({name})" for name in charts),
        "## How it was measured\n\n" + _method(report),
        "## Machine\n\n" + _machine(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _caveats(report: dict[str, Any]) -> list[str]:
    caveats = []
    if report["random_weights"]:
        caveats.append(
            f"**{', '.join(report['random_weights'])} has random weights: its answers are noise and quality means "
            "nothing here. Times, passes and memory are those of a real model of these shapes.**"
        )
    if report["stand_ins"]:
        caveats.append(
            f"**No --data was given, so the questions of {', '.join(report['stand_ins'])} are stand-ins: random "
            "letters as long as the benchmark's mean prompt.**"
        )
    if not report["together"]:
        caveats.append(f"**{order_text(False, report['why_in_place'])}**")
    return caveats


def verdict(pair: dict[str, Any], report: dict[str, Any]) -> str:
    """One line on an arm against the first."""
    figures = next(reversed(pair["tasks"].values()))  # over all tasks, or the only one
    results = report["results"]
    counts = {name: next(reversed(results[name].values()))["correct"] for name in (pair["baseline"], pair["arm"])}
    speed = figures["tokens_per_second_ratio"]
    if speed is None:
        parts = [f"**{pair['arm']}** cannot be compared in speed: **{pair['baseline']}** wrote nothing but padding"]
    else:
        low, high = speed["interval"]
        parts = [
            f"**{pair['arm']}** is {speed['ratio']:.2f} times as fast as **{pair['baseline']}** in tokens per second "
            f"(95 % interval {low:.2f} to {high:.2f})"
        ]
    if not report["random_weights"]:
        p = figures["mcnemar_p"]
        shown = "a difference in accuracy is shown" if p < LEVEL else "no difference in accuracy is shown"
        parts.append(
            f"; {counts[pair['arm']]} against {counts[pair['baseline']]} of {figures['items']} right, exact McNemar "
            f"p = {p:.3g}: {shown}"
        )
    return "".join(parts) + "."


def _arms(report: dict[str, Any]) -> str:
    rows = [
        (arm["name"], arm["description"], "; ".join(f"{k}: {v}" for k, v in arm["about"].items()))
        for arm in report["arms"]
    ]
    return _table(("arm", "what answers", "run by"), rows)


def _each(report: dict[str, Any]) -> Iterable[tuple[str, str, dict[str, Any]]]:
    """(arm, task, figures) task by task, so that arms stand under each other."""
    names = [arm["name"] for arm in report["arms"]]
    for task in report["results"][names[0]]:
        for name in names:
            yield name, task, report["results"][name][task]


def _accuracy(report: dict[str, Any]) -> str:
    rows = [
        (
            task,
            arm,
            f"{f['correct']}/{f['items']}",
            _percent(f["accuracy"]),
            _interval(f["interval"]),
            f["cut_off"],
            f["empty"],
        )
        for arm, task, f in _each(report)
    ]
    note = "Intervals are Wilson's. *Cut off* counts answers that the token limit ended, *empty* those without text."
    return _table(("task", "arm", "right", "accuracy", "95 % interval", "cut off", "empty"), rows) + f"\n\n{note}"


def _pairs(report: dict[str, Any]) -> str:
    rows = [
        (
            task, f"{pair['arm']} against {pair['baseline']}", f["both_right"], f["only_baseline_right"],
            f["only_arm_right"], f["both_wrong"], f"{f['mcnemar_p']:.3g}", _percent(f["same_verdict"]),
            _percent(f["same_answer"]),
        )
        for pair in report["comparisons"]
        for task, f in pair["tasks"].items()
    ]  # fmt: skip
    columns = ("task", "pair", "both right", "only first arm", "only this arm", "both wrong", "McNemar p")
    note = (
        "The McNemar test is exact and two-sided, on the questions that one of the two has right; p below "
        f"{LEVEL:g} is called a difference. *Same answer* is the same text."
    )
    return _table((*columns, "same verdict", "same answer"), rows) + f"\n\n{note}"


def _speed(report: dict[str, Any]) -> str:
    ratios = {(p["arm"], task): f for p in report["comparisons"] for task, f in p["tasks"].items()}
    rows = []
    for arm, task, f in _each(report):
        pair = ratios.get((arm, task))
        ratio = pair["tokens_per_second_ratio"] if pair else None
        rows.append(
            (
                task, arm, f"{f['tokens_per_second']:.1f}", f"{f['request_tokens_per_second']:.1f}",
                f"{f['seconds_per_forward'] * 1e3:.2f}", f"{f['seconds']:.1f}",
                f"{ratio['ratio']:.2f}x ({ratio['interval'][0]:.2f}-{ratio['interval'][1]:.2f})" if ratio else "",
                f"{pair['forwards_per_second_ratio']['ratio']:.2f}x" if pair else "",
            )
        )  # fmt: skip
    note = (
        "*Aggregate* is all tokens over all seconds, *per request* the mean of each answer's tokens over its seconds; "
        "padding is no token. "
        "*ms per pass* is all seconds over all denoising passes, so it holds the prompt's encoding and all the rest. "
        "Ratios are against the first arm; intervals are from a paired bootstrap over the questions."
    )
    columns = ("task", "arm", "tok/s aggregate", "tok/s per request", "ms per pass", "seconds")
    return _table((*columns, "tok/s ratio (95 %)", "passes/s ratio"), rows) + f"\n\n{note}"


def _passes(report: dict[str, Any]) -> str:
    rows = []
    for arm, task, f in _each(report):
        steps, tokens = f["steps_per_canvas"], f["answer_tokens"]
        rows.append(
            (
                task, arm, f["forwards"], f["canvases"], f"{steps['mean']:.2f} / {steps['p50']:g} / {steps['p90']:g}",
                f"{f['tokens_per_forward']:.2f}", f"{tokens['mean']:.1f} / {tokens['p50']:g} / {tokens['p90']:g}",
                f"{f['prompt_tokens']:.0f}",
            )
        )  # fmt: skip
    columns = ("task", "arm", "passes", "canvases", "steps per canvas (mean / p50 / p90)", "tokens per forward")
    return _table((*columns, "answer tokens (mean / p50 / p90)", "prompt tokens (mean)"), rows)


def _times(report: dict[str, Any]) -> str:
    rows = [
        (task, arm, *(f"{f['answer_seconds'][key]:.3f}" for key in ("mean", "p10", "p50", "p90", "p99")))
        for arm, task, f in _each(report)
    ]
    return _table(("task", "arm", "mean s", "p10", "p50", "p90", "p99"), rows)


def _memory(report: dict[str, Any]) -> str:
    gpu = report["device"].startswith("cuda")
    rows = []
    for arm in report["arms"]:
        figures = next(reversed(report["results"][arm["name"]].values()))
        rows.append((arm["name"], _gib(figures["weight_bytes"]), _gib(figures["peak_bytes"])))
    note = (
        "*Peak* is what the arm alone takes on the GPU: its weights, what it keeps between answers, and the most it "
        "allocated during one; tensors that arms share count for each."
        if gpu
        else "On a CPU the peak is the resident size of the process with all arms, until the arm's last answer."
    )
    return _table(("arm", "weights GiB", "peak GiB"), rows) + f"\n\n{note}"


def _method(report: dict[str, Any]) -> str:
    lines = [
        order_text(report["together"], report["why_in_place"]),
        f"{report['questions']} questions ({', '.join(report['tasks'])}, the first {report['limit']} of each at most), "
        "one at a time. A question's seed comes from its index and --seed "
        f"{report['seed']}, and is set anew before every answer.",
        "Before the clock started, after loading and after every resumption, every arm answered the longest question "
        f"and began to answer the first {WARM_UP_STARTS}. Seconds run from the prompt's text to the answer's, the "
        "tokenizer included; grading is not timed.",
    ]
    if report["fixed_steps"] is not None:
        lines.append(f"--fixed-steps {report['fixed_steps']}: every canvas took exactly so many passes.")
    if report["random_weights"]:
        lines.append("With random weights end tokens are ignored, so every answer has max_new_tokens tokens.")
    columns = ("arm", *next(iter(report["settings"].values())))
    rows = [(name, *map(str, values.values())) for name, values in report["settings"].items()]
    return _bullets(lines) + "\n\n" + _table(columns, rows)


def _machine(report: dict[str, Any]) -> str:
    environment = {k: v for k, v in report["environment"].items() if v is not None}
    lines = [
        f"{', '.join(f'{k} {v}' for k, v in environment.items())}, dtype {report['dtype']}",
        _probe(report["probe"]),
    ]
    return _bullets(lines)


def _probe(probe: dict[str, Any]) -> str:
    rates = ", ".join(f"{rate:,.2f} TFLOP/s {name}" for name, rate in probe["matmul_tflops"].items())
    return (
        f"measured before the run: copy {probe['copy_gbps']:,.1f} GB/s, read {probe['read_gbps']:,.1f} GB/s, {rates}, "
        f"launch {probe['launch_us']:.1f} us"
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|")


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _interval(ends: Sequence[float]) -> str:
    return f"{100 * ends[0]:.1f} to {100 * ends[1]:.1f}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.3f}"
