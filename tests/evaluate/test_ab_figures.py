"""Statistics of pairs, and the figures of a comparison from its records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redraft.evaluate.ab_run import AbRecord
from redraft.evaluate.statistics import mcnemar_p, rate_ratio
from redraft.evaluate.summary import arm_figures, compare_arms, summarise_arms


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


def test_a_constant_ratio_has_no_spread() -> None:
    baseline = [(10.0, 1.0), (40.0, 7.0), (5.0, 0.1)]
    other = [(tokens, seconds / 1.6) for tokens, seconds in baseline]
    assert rate_ratio(baseline, other) == pytest.approx((1.6, 1.6, 1.6))


def test_a_baseline_that_wrote_nothing_has_no_ratio() -> None:
    assert rate_ratio([(0.0, 1.0), (0.0, 2.0)], [(5.0, 1.0), (5.0, 1.0)]) is None
    partly = rate_ratio([(0.0, 1.0), (4.0, 1.0)], [(4.0, 1.0), (4.0, 1.0)])
    assert partly is not None and partly[0] == pytest.approx(2)


def test_the_interval_holds_the_ratio_and_repeats() -> None:
    baseline = [(10.0, 1.0 + 0.1 * i) for i in range(30)]
    other = [(10.0, 0.6 + 0.02 * (i % 7)) for i in range(30)]
    found = rate_ratio(baseline, other)
    assert found is not None
    ratio, low, high = found
    assert ratio == pytest.approx(sum(s for _, s in baseline) / sum(s for _, s in other))
    assert low < ratio < high
    assert found == rate_ratio(baseline, other)


def record(arm: str, item: int, correct: bool, seconds: float, **changes: object) -> AbRecord:
    base = {
        "id": f"t/{item}", "task": "t", "prompt": "p", "answer": f"a{correct}", "expected": "a", "tokens": 10,
        "forwards": 4, "tokens_per_forward": 2.5, "steps_per_canvas": [4], "finish_reason": "stop",
        "answer_seconds": seconds, "seed": 1, "turn": 0, "prompt_tokens": 7, "canvases": 1, "weight_bytes": 50,
        "peak_bytes": 90 + item,
    }  # fmt: skip
    return AbRecord(**{**base, **changes}, arm=arm, correct=correct, seconds=seconds)  # type: ignore[arg-type]


RECORDS = [
    # Out of order, as turns are: pairs are found by question, not by place.
    record("b", 1, False, 1.0, tokens=20),
    record("a", 0, True, 2.0),
    record("a", 1, True, 4.0, tokens=30, steps_per_canvas=[4, 8], forwards=12, canvases=2, finish_reason="length"),
    record("b", 0, True, 0.5),
    record("a", 0, False, 8.0, task="u", id="u/0"),
    record("b", 0, True, 8.0, task="u", id="u/0"),
]


def test_figures_of_an_arm() -> None:
    figures = summarise_arms(RECORDS, ["a", "b"], ["t", "u"])
    a = figures["a"]["t"]
    assert (a["items"], a["correct"], a["cut_off"], a["canvases"]) == (2, 2, 1, 2 + 1)
    assert a["tokens_per_second"] == pytest.approx(40 / 6)  # aggregate
    assert a["request_tokens_per_second"] == pytest.approx((10 / 2 + 30 / 4) / 2)  # mean of each
    assert a["seconds_per_forward"] == pytest.approx(6 / 16)
    assert a["steps_per_canvas"]["mean"] == pytest.approx(16 / 3)
    assert a["answer_tokens"]["p50"] == 20
    assert a["answer_seconds"]["p90"] == pytest.approx(3.8)
    assert (a["weight_bytes"], a["peak_bytes"]) == (50, 91)
    assert figures["a"]["all"]["items"] == 3
    assert "all" not in summarise_arms(RECORDS, ["a"], ["t"])["a"]
    assert arm_figures(RECORDS[:1])["tokens"] == 20


def test_pairs_are_of_the_same_question() -> None:
    (pair,) = compare_arms(RECORDS, ["a", "b"], ["t", "u"])
    assert (pair["baseline"], pair["arm"]) == ("a", "b")
    t, both = pair["tasks"]["t"], pair["tasks"]["all"]
    assert (t["both_right"], t["only_baseline_right"], t["only_arm_right"], t["both_wrong"]) == (1, 1, 0, 0)
    assert (t["same_verdict"], t["same_answer"], t["differing"]) == (0.5, 0.5, ["t/1"])
    assert t["accuracy_difference"] == -0.5
    assert t["tokens_per_second_ratio"]["ratio"] == pytest.approx((30 / 1.5) / (40 / 6))
    assert t["forwards_per_second_ratio"]["ratio"] == pytest.approx((8 / 1.5) / (16 / 6))
    assert t["request_tokens_per_second_ratio"] == pytest.approx(((20 + 20) / 2) / ((5 + 7.5) / 2))
    assert (both["items"], both["only_baseline_right"], both["only_arm_right"], both["mcnemar_p"]) == (3, 1, 1, 1.0)
