"""Figures of an evaluation, of arms and of pairs, from records."""

from typing import Any

import pytest
from evaluate.answers import record

from redraft.evaluate.run import Record
from redraft.evaluate.summary import arm_figures, by_task, compare_arms, summarise


def test_summary_values() -> None:
    wrong = record(
        correct=False, tokens=30, forwards=12, tokens_per_forward=2.0, steps_per_canvas=[4, 8], seconds=3.0,
        answer_seconds=5.0, finish_reason="length",
    )  # fmt: skip
    summary = summarise([record(), wrong])
    assert (summary["accuracy"], summary["tokens_per_second"], summary["seconds"]) == (0.5, 8.0, 5.0)
    assert (summary["tokens_per_forward"], summary["cut_off"]) == ((10 + 24) / 16, 1)
    assert summary["steps_per_canvas"] == {"mean": pytest.approx(16 / 3), "p50": 4.0, "p90": pytest.approx(7.2)}
    assert summary["answer_seconds"] == {"mean": 4.0, "p50": 4.0, "p90": pytest.approx(4.8)}


def of_arm(arm: str, item: int, correct: bool, seconds: float, **changes: object) -> Record:
    base: dict[str, Any] = {
        "id": f"t/{item}", "answer": f"a{correct}", "answer_seconds": seconds, "prompt_tokens": 7, "canvases": 1,
        "weight_bytes": 50, "peak_bytes": 90 + item,
    }  # fmt: skip
    return record(**{**base, **changes}, arm=arm, correct=correct, seconds=seconds)


RECORDS = [
    # Out of order, as turns are: pairs are found by question, not by place.
    of_arm("b", 1, False, 1.0, tokens=20),
    of_arm("a", 0, True, 2.0),
    of_arm("a", 1, True, 4.0, tokens=30, steps_per_canvas=[4, 8], forwards=12, canvases=2, finish_reason="length"),
    of_arm("b", 0, True, 0.5),
    of_arm("a", 0, False, 8.0, task="u", id="u/0"),
    of_arm("b", 0, True, 8.0, task="u", id="u/0"),
]


def test_figures_of_an_arm() -> None:
    mine = [r for r in RECORDS if r.arm == "a"]
    figures = by_task(mine, ["t", "u"], arm_figures)
    a = figures["t"]
    assert (a["items"], a["correct"], a["cut_off"], a["canvases"]) == (2, 2, 1, 2 + 1)
    assert a["tokens_per_second"] == pytest.approx(40 / 6)  # aggregate
    assert a["request_tokens_per_second"] == pytest.approx((10 / 2 + 30 / 4) / 2)  # mean of each
    assert a["seconds_per_forward"] == pytest.approx(6 / 16)
    spreads = a["steps_per_canvas"]["mean"], a["answer_tokens"]["p50"], a["answer_seconds"]["p90"]
    assert spreads == (pytest.approx(16 / 3), 20, pytest.approx(3.8))
    assert (a["weight_bytes"], a["peak_bytes"]) == (50, 91)
    assert figures["all"]["items"] == 3
    assert "all" not in by_task(mine, ["t"], arm_figures)
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
