"""Intervals, tests and ratios against values computed by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redraft.evaluate.statistics import mcnemar_p, percentile, rate_ratio, wilson_interval


# Wilson's formula by hand with z = 1.959964: for 8 of 10, z² = 3.841459,
# centre (0.8 + 0.192073) / 1.384146 = 0.716740, half 1.959964 * sqrt(0.016 + 0.009604) / 1.384146 = 0.226577.
@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [
        (8, 10, 0.490162, 0.943318),
        (0, 10, 0.0, 0.277533),  # z² / (n + z²)
        (10, 10, 0.722467, 1.0),  # n / (n + z²)
        (1, 2, 0.094531, 0.905469),  # 0.5 -+ z / (2 sqrt(n + z²))
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_interval_against_hand_computed_values(correct: int, total: int, low: float, high: float) -> None:
    assert wilson_interval(correct, total) == pytest.approx((low, high), abs=1e-6)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_the_proportion_and_is_symmetric(counts: tuple[int, int]) -> None:
    correct, total = counts
    low, high = wilson_interval(correct, total)
    assert 0 <= low <= correct / total <= high <= 1
    assert wilson_interval(total - correct, total) == pytest.approx((1 - high, 1 - low))


def test_percentiles_and_refusals() -> None:
    assert [percentile([4, 1, 3, 2], q) for q in (0, 50, 90, 100)] == pytest.approx([1, 2.5, 3.7, 4])
    assert percentile([7], 90) == 7
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    with pytest.raises(ValueError, match="3 correct of 2"):
        wilson_interval(3, 2)


# By hand: 2 * sum of C(n, k) for k up to the smaller count, over 2^n.
@pytest.mark.parametrize(
    ("first", "second", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),  # 2 * 1 / 2
        (5, 1, 14 / 64),  # 2 * (1 + 6) / 64
        (10, 0, 2 / 1024),
        (3, 3, 1.0),  # 2 * 42 / 64 is above one
        (15, 5, 2 * (1 + 20 + 190 + 1140 + 4845 + 15504) / 2**20),
    ],
)
def test_mcnemar_against_hand_computed_values(first: int, second: int, p: float) -> None:
    assert mcnemar_p(first, second) == pytest.approx(p, rel=1e-12)


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_symmetric_and_a_probability(first: int, second: int) -> None:
    assert 0 < mcnemar_p(first, second) == mcnemar_p(second, first) <= 1


def test_a_constant_ratio_has_no_spread_and_an_empty_baseline_no_ratio() -> None:
    baseline = [(10.0, 1.0), (40.0, 7.0), (5.0, 0.1)]
    found = rate_ratio(baseline, [(tokens, seconds / 1.6) for tokens, seconds in baseline])
    assert found == {"ratio": pytest.approx(1.6), "interval": pytest.approx([1.6, 1.6])}
    assert rate_ratio([(0.0, 1.0), (0.0, 2.0)], [(5.0, 1.0), (5.0, 1.0)]) is None
    partly = rate_ratio([(0.0, 1.0), (4.0, 1.0)], [(4.0, 1.0), (4.0, 1.0)])
    assert partly is not None and partly["ratio"] == pytest.approx(2)


def test_the_interval_holds_the_ratio_and_repeats() -> None:
    baseline = [(10.0, 1.0 + 0.1 * i) for i in range(30)]
    other = [(10.0, 0.6 + 0.02 * (i % 7)) for i in range(30)]
    found = rate_ratio(baseline, other)
    assert found is not None
    assert found["ratio"] == pytest.approx(sum(s for _, s in baseline) / sum(s for _, s in other))
    assert found["interval"][0] < found["ratio"] < found["interval"][1]
    assert found == rate_ratio(baseline, other)
