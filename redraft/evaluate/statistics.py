"""Intervals and summaries that a report may quote."""

import math
import random
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

from redraft.bench.timing import percentile

RESAMPLES = 2000  # of the questions, for an interval of a ratio


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a proportion: honest for few items and near 0 or 1, where the normal one is not.

    (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n), E. B. Wilson, JASA 22 (1927). No items: (0, 1).
    """
    if not 0 <= correct <= total:
        raise ValueError(f"{correct} correct of {total}: expected 0 <= correct <= total")
    if total == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.975)
    p = correct / total
    centre = p + z * z / (2 * total)
    half = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # Without the two cases rounding puts the ends of 0 and of n out of n some 1e-18 beside 0 and 1.
    return (0.0 if correct == 0 else (centre - half) / scale), (1.0 if correct == total else (centre + half) / scale)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Two-sided exact McNemar test of paired verdicts: the chance of a split at least this uneven if both are as good.

    Of the items that exactly one side has right, each is either's with probability 1/2 under the null hypothesis
    (Q. McNemar, Psychometrika 12 (1947), in its exact binomial form). No such items: 1.
    """
    total, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(total, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**total)


def rate_ratio(baseline: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> dict[str, Any] | None:
    """The rate of `other` over that of `baseline`: "ratio", and its 95 % bootstrap "interval" [low, high].

    Pair i of both is (amount, time) of the same question, a rate is all amounts over all times, and whole questions
    are resampled, so that what makes one long for both sides cancels. The same input gives the same interval. None
    where the baseline has no amount.
    """

    def rate(pairs: Sequence[tuple[float, float]], indices: Sequence[int]) -> float:
        return sum(pairs[i][0] for i in indices) / sum(pairs[i][1] for i in indices)

    draw, indices = random.Random(0), range(len(baseline))
    below = rate(baseline, indices)
    if not below:
        return None
    samples = (draw.choices(indices, k=len(baseline)) for _ in range(RESAMPLES))
    ratios = [rate(other, sample) / some for sample in samples if (some := rate(baseline, sample))]
    return {"ratio": rate(other, indices) / below, "interval": [percentile(ratios, q) for q in (2.5, 97.5)]}
