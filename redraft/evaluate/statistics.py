"""Intervals and summaries that a report may quote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist


def wilson_interval(correct: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion: honest for few items and near 0 or 1, where the normal one is not.

    (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n), E. B. Wilson, JASA 22 (1927). No items: (0, 1).
    """
    if not 0 <= correct <= total:
        raise ValueError(f"{correct} correct of {total}: expected 0 <= correct <= total")
    if total == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = correct / total
    centre = p + z * z / (2 * total)
    half = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # Without the two cases rounding puts the ends of 0 and of n out of n some 1e-18 beside 0 and 1.
    return (0.0 if correct == 0 else (centre - half) / scale), (1.0 if correct == total else (centre + half) / scale)


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), linear between neighbours; NaN-free: no values is an error."""
    if not values:
        raise ValueError("percentile of no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
