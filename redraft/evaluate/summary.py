"""The figures of an evaluation or a comparison, from its answers alone, as JSON-ready dicts."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from redraft.evaluate.run import Record
from redraft.evaluate.statistics import mcnemar_p, percentile, rate_ratio, wilson_interval

ALL = "all"  # tasks together
PERCENTS = (10, 50, 90, 99)  # of the spreads of a comparison


def by_task(
    records: Sequence[Record], tasks: Sequence[str], figures: Callable[[Sequence[Record]], dict[str, Any]]
) -> dict[str, Any]:
    """Figures by task; with several tasks also over all of them."""
    scopes = [*tasks, *([ALL] if len(tasks) > 1 else [])]
    return {scope: figures([r for r in records if scope in (r.task, ALL)]) for scope in scopes}


def compare_arms(records: Sequence[Record], arms: Sequence[str], tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Every later arm against the first, question by question."""
    against = {arm: partial(pair_figures, baseline=arms[0], arm=arm) for arm in arms[1:]}
    return [{"baseline": arms[0], "arm": arm, "tasks": by_task(records, tasks, f)} for arm, f in against.items()]


def summarise(records: Sequence[Record], percents: Sequence[int] = (50, 90)) -> dict[str, Any]:
    """Accuracy with its 95 % interval, speed and steps of at least one record. percents: of the spreads."""
    correct, tokens = sum(r.correct for r in records), sum(r.tokens for r in records)
    forwards, seconds = sum(r.forwards for r in records), sum(r.seconds for r in records)
    return {
        "items": len(records), "correct": correct, "accuracy": correct / len(records),
        "interval": list(wilson_interval(correct, len(records))), "tokens": tokens, "forwards": forwards,
        "tokens_per_forward": sum(r.tokens_per_forward * r.forwards for r in records) / forwards,
        "tokens_per_second": tokens / seconds,
        "steps_per_canvas": _spread([s for r in records for s in r.steps_per_canvas], percents),
        "answer_seconds": _spread([r.answer_seconds for r in records], percents),
        "cut_off": sum(r.finish_reason == "length" for r in records), "seconds": seconds,
    }  # fmt: skip


def arm_figures(records: Sequence[Record]) -> dict[str, Any]:
    """What `redraft eval` gives, and what only one answer at a time can tell."""
    figures = summarise(records, PERCENTS)
    return {
        **figures, "request_tokens_per_second": _mean_rate(records),
        "seconds_per_forward": figures["seconds"] / figures["forwards"], "canvases": sum(r.canvases for r in records),
        "answer_tokens": _spread([r.tokens for r in records], PERCENTS),
        "empty": sum(not r.answer.strip() for r in records), "prompt_tokens": fmean([r.prompt_tokens for r in records]),
        "weight_bytes": max(r.weight_bytes for r in records), "peak_bytes": max(r.peak_bytes for r in records),
    }  # fmt: skip


def _spread(values: Sequence[float], percents: Sequence[int]) -> dict[str, float]:
    return {"mean": fmean(values), **{f"p{q}": percentile(values, q) for q in percents}}


def pair_figures(records: Sequence[Record], baseline: str, arm: str) -> dict[str, Any]:
    """Two arms on the same questions: verdicts, agreement, and how many times as fast `arm` is."""
    sides = [sorted((r for r in records if r.arm == name), key=lambda r: r.id) for name in (baseline, arm)]
    pairs = list(zip(*sides, strict=True))
    verdicts = Counter((a.correct, b.correct) for a, b in pairs)
    only_baseline, only_arm = verdicts[True, False], verdicts[False, True]
    of_baseline, of_arm = map(_mean_rate, sides)
    work = [[(r.tokens, r.seconds) for r in side] for side in sides]
    passes = [[(r.forwards, r.seconds) for r in side] for side in sides]
    return {
        "items": len(pairs), "both_right": verdicts[True, True], "only_baseline_right": only_baseline,
        "only_arm_right": only_arm, "both_wrong": verdicts[False, False],
        "accuracy_difference": (only_arm - only_baseline) / len(pairs), "mcnemar_p": mcnemar_p(only_baseline, only_arm),
        "same_verdict": 1 - (only_baseline + only_arm) / len(pairs),
        "same_answer": sum(a.answer == b.answer for a, b in pairs) / len(pairs),
        "tokens_per_second_ratio": rate_ratio(*work), "forwards_per_second_ratio": rate_ratio(*passes),
        "request_tokens_per_second_ratio": of_arm / of_baseline if of_baseline else None,
        "differing": [a.id for a, b in pairs if a.correct != b.correct],
    }  # fmt: skip


def _mean_rate(records: Sequence[Record]) -> float:
    return fmean([r.tokens / r.seconds for r in records])
