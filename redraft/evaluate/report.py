"""The figures of an evaluation or a comparison in tables, and a comparison's page, which says how they were made."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from redraft.tables import Table

LEVEL = 0.05  # below this a McNemar test is called a difference
WARM_UP_STARTS = 16  # questions that an arm begins to answer before the clock starts

# Columns of tables, by name, with what `cells` writes under them.
RIGHT, ACCURACY_PERCENT, INTERVAL = "{correct}/{items}", "{accuracy_percent:.1f} %", "{low:.1f} to {high:.1f}"
RATE, MEAN_RATE = "{tokens_per_second:.1f}", "{request_tokens_per_second:.1f}"
PER_FORWARD = "{tokens_per_forward:.2f}"
EVALUATION = {
    "correct": RIGHT, "accuracy": ACCURACY_PERCENT, "95 % interval": INTERVAL, "tok/s": RATE,
    "tok/forward": PER_FORWARD,
    "steps mean/p50/p90": "{steps_per_canvas[mean]:.1f} / {steps_per_canvas[p50]:g} / {steps_per_canvas[p90]:g}",
    "answer s mean/p50/p90": "{answer_seconds[mean]:.2f} / {answer_seconds[p50]:.2f} / {answer_seconds[p90]:.2f}",
    "seconds": "{seconds:.1f}",
}  # fmt: skip
COMPARISON = {
    "right": RIGHT, "95 % interval": INTERVAL, "tok/s": RATE, "tok/s per request": MEAN_RATE,
    "steps/canvas": "{steps_per_canvas[mean]:.2f}", "tok/forward": PER_FORWARD,
    "answer s p50 / p90": "{answer_seconds[p50]:.2f} / {answer_seconds[p90]:.2f}", "peak GiB": "{peak_gib:.2f}",
}  # fmt: skip
ACCURACY = {
    "right": RIGHT, "accuracy": ACCURACY_PERCENT, "95 % interval": INTERVAL, "cut off": "{cut_off}",
    "empty": "{empty}",
}  # fmt: skip
PAIRS = {
    "both right": "{both_right}", "only first arm": "{only_baseline_right}", "only this arm": "{only_arm_right}",
    "both wrong": "{both_wrong}", "McNemar p": "{mcnemar_p:.3g}", "same verdict": "{same_verdict_percent:.1f} %",
    "same answer": "{same_answer_percent:.1f} %",
}  # fmt: skip
SPEED = {
    "tok/s aggregate": RATE, "tok/s per request": MEAN_RATE, "ms per pass": "{ms_per_forward:.2f}",
    "seconds": "{seconds:.1f}", "tok/s ratio (95 %)": "{tokens_ratio}", "passes/s ratio": "{forwards_ratio}",
}  # fmt: skip
PASSES = {
    "passes": "{forwards}", "canvases": "{canvases}",
    "steps per canvas (mean / p50 / p90)":
        "{steps_per_canvas[mean]:.2f} / {steps_per_canvas[p50]:g} / {steps_per_canvas[p90]:g}",
    "tokens per forward": PER_FORWARD,
    "answer tokens (mean / p50 / p90)":
        "{answer_tokens[mean]:.1f} / {answer_tokens[p50]:g} / {answer_tokens[p90]:g}",
    "prompt tokens (mean)": "{prompt_tokens:.0f}",
}  # fmt: skip
TIMES = {"mean s": "{answer_seconds[mean]:.3f}"} | {
    name: f"{{answer_seconds[{name}]:.3f}}" for name in ("p10", "p50", "p90", "p99")
}
MEMORY = {"weights GiB": "{weight_gib:.3f}", "peak GiB": "{peak_gib:.3f}"}
CAVEATS = {
    "random_weights": "{} has random weights: its answers are noise and quality means nothing here. Times, passes and "
    "memory are those of a real model of these shapes.",
    "stand_ins": "No --data was given, so the questions of {} are stand-ins: random letters as long as the benchmark's "
    "mean prompt.",
}  # by field of a report, with the names it holds


def cells(columns: Mapping[str, str], figures: Mapping[str, Any]) -> list[str]:
    """A row under `columns`: a summary's figures, and some of them in per cent, milliseconds and GiB.

    Figures of a pair give its ratios too; they are empty for the first arm, and where that wrote nothing.
    """
    shown = dict(figures)
    for share in {"accuracy", "same_verdict", "same_answer"} & figures.keys():
        shown[f"{share}_percent"] = 100 * figures[share]
    if "interval" in figures:
        shown["low"], shown["high"] = (100 * end for end in figures["interval"])
    if "peak_bytes" in figures:
        shown["ms_per_forward"] = 1e3 * figures["seconds_per_forward"]
        shown["weight_gib"], shown["peak_gib"] = (figures[name] / 2**30 for name in ("weight_bytes", "peak_bytes"))
    for work, text in (("tokens", "{ratio:.2f}x ({interval[0]:.2f}-{interval[1]:.2f})"), ("forwards", "{ratio:.2f}x")):
        ratio = figures.get(f"{work}_per_second_ratio")
        shown[f"{work}_ratio"] = text.format_map(ratio) if ratio else ""
    return [text.format_map(shown) for text in columns.values()]


def overall(figures: Mapping[str, Any]) -> Any:
    """Of figures by task those over all tasks, or of the only one."""
    return next(reversed(list(figures.values())))


def markdown(report: dict[str, Any], charts: Sequence[str]) -> str:
    """The page. `report` is what report.json holds; charts are file names beside it."""
    names, settings = [arm["name"] for arm in report["arms"]], report["settings"]
    pairs = [(pair, task, figures) for pair in report["comparisons"] for task, figures in pair["tasks"].items()]
    against_first = {(pair["arm"], task): figures for pair, task, figures in pairs}
    # Task by task, so that arms stand under each other.
    each = [(task, arm, report["results"][arm][task]) for task in report["results"][names[0]] for arm in names]

    def by_task(columns: Mapping[str, str]) -> str:
        rows = ((task, arm, *cells(columns, f | against_first.get((arm, task), {}))) for task, arm, f in each)
        return Table(("task", "arm", *columns), rows).markdown()

    arms = ((a["name"], a["description"], "; ".join(map(": ".join, a["about"].items()))) for a in report["arms"])
    against = ((task, f"{pair['arm']} against {pair['baseline']}", *cells(PAIRS, f)) for pair, task, f in pairs)
    memory = ((name, *cells(MEMORY, overall(report["results"][name]))) for name in names)
    parts = [
        f"# {report['model']}: {' against '.join(names)}",
        *_caveats(report),
        _bullets(verdict(pair, report) for pair in report["comparisons"]),
        "## Arms", Table(("arm", "what answers", "run by"), arms).markdown(),
        "## Accuracy", by_task(ACCURACY),
        "Intervals are Wilson's. *Cut off* counts answers that the token limit ended, *empty* those without text.",
        "## Question by question", Table(("task", "pair", *PAIRS), against).markdown(),
        "The McNemar test is exact and two-sided, on the questions that one of the two has right; p below "
        f"{LEVEL:g} is called a difference. *Same answer* is the same text.",
        "## Speed", by_task(SPEED),
        "*Aggregate* is all tokens over all seconds, *per request* the mean of each answer's tokens over its seconds; "
        "padding is no token. "
        "*ms per pass* is all seconds over all denoising passes, so it holds the prompt's encoding and all the rest. "
        "Ratios are against the first arm; intervals are from a paired bootstrap over the questions.",
        "## Passes and answers", by_task(PASSES),
        "## Time to answer", by_task(TIMES),
        "## Memory", Table(("arm", *MEMORY), memory).markdown(),
        "*Peak* is what the arm alone takes on the GPU: its weights, what it keeps between answers, and the most it "
        "allocated during one; tensors that arms share count for each."
        if report["device"].startswith("cuda")
        else "On a CPU the peak is the resident size of the process with all arms, until the arm's last answer.",
        "\n".join(f"![{name.removesuffix('.png')}]({name})" for name in charts),
        "## How it was measured", _bullets(_method(report)),
        Table(("arm", *settings[names[0]]), ((name, *settings[name].values()) for name in names)).markdown(),
        "## Machine", _bullets(_machine(report)),
    ]  # fmt: skip
    return "\n\n".join(filter(None, parts)) + "\n"


def _caveats(report: dict[str, Any]) -> Iterator[str]:
    for field, caveat in CAVEATS.items():
        if report[field]:
            yield f"**{caveat.format(', '.join(report[field]))}**"
    if not report["together"]:
        yield f"**{order_text(report)}**"


def verdict(pair: dict[str, Any], report: dict[str, Any]) -> str:
    """One line on an arm against the first."""
    arm, baseline, figures = pair["arm"], pair["baseline"], overall(pair["tasks"])
    speed, p = figures["tokens_per_second_ratio"], figures["mcnemar_p"]
    text = f"**{arm}** cannot be compared in speed: **{baseline}** wrote nothing but padding"
    if speed is not None:
        interval = "95 % interval {:.2f} to {:.2f}".format(*speed["interval"])
        text = f"**{arm}** is {speed['ratio']:.2f} times as fast as **{baseline}** in tokens per second ({interval})"
    if not report["random_weights"]:
        mine, theirs = (overall(report["results"][name])["correct"] for name in (arm, baseline))
        test = f"exact McNemar p = {p:.3g}: {'a' if p < LEVEL else 'no'} difference in accuracy is shown"
        text += f"; {mine} against {theirs} of {figures['items']} right, {test}"
    return f"{text}."


def order_text(report: dict[str, Any]) -> str:
    """What a reader has to know about the order of answers."""
    if report["together"]:
        return (
            "All arms were loaded at once and took turns question by question, in the given order for one question and "
            "in the reverse order for the next (AB BA)."
        )
    return (
        f"The order is NOT counterbalanced: {report['why_in_place']}, so each set of weights answered all questions "
        "before the next was packed in its place or loaded. A machine that warms up or slows down is part of the "
        "difference."
    )


def _method(report: dict[str, Any]) -> Iterator[str]:
    yield order_text(report)
    yield (
        f"{report['questions']} questions ({', '.join(report['tasks'])}, the first {report['limit']} of each at most), "
        f"one at a time. A question's seed comes from its index and --seed {report['seed']}, and is set anew before "
        "every answer."
    )
    yield (
        "Before the clock started, after loading and after every resumption, every arm answered the longest question "
        f"and began to answer the first {WARM_UP_STARTS}. Seconds run from the prompt's text to the answer's, the "
        "tokenizer included; grading is not timed."
    )
    if report["fixed_steps"] is not None:
        yield f"--fixed-steps {report['fixed_steps']}: every canvas took exactly so many passes."
    if report["random_weights"]:
        yield "With random weights end tokens are ignored, so every answer has max_new_tokens tokens."


def _machine(report: dict[str, Any]) -> tuple[str, str]:
    versions = ", ".join(f"{name} {value}" for name, value in report["environment"].items() if value is not None)
    probe = report["probe"]
    copied = f"copy {probe['copy_gbps']:,.1f} GB/s, read {probe['read_gbps']:,.1f} GB/s"
    rates = ", ".join(f"{rate:,.2f} TFLOP/s {name}" for name, rate in probe["matmul_tflops"].items())
    measured = f"measured before the run: {copied}, {rates}, launch {probe['launch_us']:.1f} us"
    return f"{versions}, dtype {report['dtype']}", measured


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
