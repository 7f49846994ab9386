"""Evaluation apart from the command line: seeds, records, summaries, the results file, intervals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from redraft.errors import RedraftError, UsageError
from redraft.evaluate.run import (
    Record,
    ResultsFile,
    evaluate,
    item_seed,
    part_path,
    run_id,
    summarise,
)
from redraft.evaluate.statistics import percentile, wilson_interval
from redraft.evaluate.tasks import Item


class Echo:
    """Right when the engine repeats an even number and ends."""

    name = "echo"
    description = "repeat"

    def items(self, limit: int) -> list[Item]:
        return [Item(f"echo/{n}", str(n), f"You said: {n}") for n in range(limit)]

    def grade(self, item: Item, answer: str, ended: bool = True) -> bool:
        return ended and answer == item.expected and int(item.prompt) % 2 == 0


ITEMS = Echo().items(5)


def record(**changes: object) -> Record:
    base = {
        "id": "t/0", "task": "t", "prompt": "p", "answer": "a", "expected": "a", "correct": True, "tokens": 10,
        "forwards": 4, "tokens_per_forward": 2.5, "steps_per_canvas": [4], "finish_reason": "stop", "seconds": 2.0,
        "answer_seconds": 3.0, "seed": 1,
    }  # fmt: skip
    return Record(**{**base, **changes})  # type: ignore[arg-type]


def test_records_carry_the_answer_its_grade_and_its_seed() -> None:
    engine = FakeEngine()
    records = list(evaluate(engine, Echo(), ITEMS, seed=9, batch_size=2))  # type: ignore[arg-type]
    assert engine.batches == [2, 2, 1]
    assert [r.correct for r in records] == [True, False, True, False, True]
    first = records[0]
    assert (first.id, first.prompt, first.answer, first.expected) == ("echo/0", "0", "You said: 0", "You said: 0")
    assert (first.tokens, first.forwards, first.steps_per_canvas, first.finish_reason) == (12, 2, [2], "stop")
    assert [r.seed for r in records] == [item_seed(9, i) for i in range(5)]
    assert all(r.answer_seconds >= 0.5 for r in records)  # the fake engine's own clock


def test_a_cut_answer_reaches_the_grader_as_cut() -> None:
    records = list(evaluate(FakeEngine(), Echo(), ITEMS[:1], settings={"max_new_tokens": 11}))  # type: ignore[arg-type]
    assert [(r.answer, r.finish_reason, r.correct) for r in records] == [("You said: 0", "length", False)]


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_results_do_not_depend_on_batch_size_or_on_what_is_done(batch_size: int) -> None:
    def essence(records: list[Record]) -> list[tuple[str, str, int]]:
        return [(r.id, r.answer, r.seed) for r in records]

    whole = essence(list(evaluate(FakeEngine(), Echo(), ITEMS, batch_size=5)))  # type: ignore[arg-type]
    assert essence(list(evaluate(FakeEngine(), Echo(), ITEMS, batch_size=batch_size))) == whole  # type: ignore[arg-type]
    rest = list(
        evaluate(FakeEngine(), Echo(), ITEMS, batch_size=batch_size, skip={"echo/0", "echo/3"})  # type: ignore[arg-type]
    )
    assert essence(rest) == [whole[1], whole[2], whole[4]]


def test_item_seeds_are_fixed_distinct_and_in_range() -> None:
    assert item_seed(0, 0) == 3065247057545751466  # half of the first 8 bytes of sha256("0/0")
    seeds = {item_seed(s, i) for s in range(20) for i in range(200)}
    assert len(seeds) == 4000
    assert all(0 <= s < 2**63 for s in seeds)


def test_summary_values() -> None:
    summary = summarise(
        [
            record(),
            record(
                correct=False,
                tokens=30,
                forwards=12,
                tokens_per_forward=2.0,
                steps_per_canvas=[4, 8],
                seconds=3.0,
                answer_seconds=5.0,
                finish_reason="length",
            ),
        ]
    )
    assert summary["accuracy"] == 0.5
    assert summary["tokens_per_second"] == 8.0
    assert summary["tokens_per_forward"] == (10 + 24) / 16
    assert summary["steps_per_canvas"] == {"mean": pytest.approx(16 / 3), "p50": 4.0, "p90": pytest.approx(7.2)}
    assert summary["answer_seconds"] == {"mean": 4.0, "p50": 4.0, "p90": pytest.approx(4.8)}
    assert summary["cut_off"] == 1
    assert summary["seconds"] == 5.0


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


def test_wilson_interval_refuses_impossible_counts() -> None:
    with pytest.raises(ValueError, match="3 correct of 2"):
        wilson_interval(3, 2)


def test_percentiles() -> None:
    assert [percentile([4, 1, 3, 2], q) for q in (0, 50, 90, 100)] == pytest.approx([1, 2.5, 3.7, 4])
    assert percentile([7], 90) == 7
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_run_id_depends_on_every_value_and_not_on_their_order() -> None:
    assert run_id({"a": 1, "b": [2]}) == run_id({"b": [2], "a": 1})
    assert run_id({"a": 1}) != run_id({"a": 2})
    assert len(run_id({})) == 12


def test_results_take_their_name_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, "run", Record) as file:
        assert file.done == []
        file.append(record(answer="é\n"))
        assert not path.exists()
    assert json.loads(path.read_text())["answer"] == "é\n"
    assert json.loads(path.read_text())["run"] == "run"
    assert not part_path(path).exists()


def test_a_line_cut_in_the_middle_is_dropped_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with pytest.raises(KeyboardInterrupt), ResultsFile(path, "run", Record) as file:
        file.append(record())
        raise KeyboardInterrupt
    with part_path(path).open("a") as part:
        part.write('{"id": "t/1", "ta')
    with ResultsFile(path, "run", Record) as file:
        assert file.done == [record()]
        file.append(record(id="t/1"))
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["t/0", "t/1"]


def test_a_damaged_or_foreign_part_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    part_path(path).write_text('{"id": 3}\n')
    with pytest.raises(RedraftError, match=r"r.jsonl.part: line 1 is not a result"):
        ResultsFile(path, "run", Record)
    assert part_path(path).read_text() == '{"id": 3}\n'
    part_path(path).unlink()
    with pytest.raises(KeyboardInterrupt), ResultsFile(path, "run", Record) as file:
        file.append(record())
        raise KeyboardInterrupt
    with pytest.raises(UsageError, match="another model, seed, task or setting"):
        ResultsFile(path, "other", Record)
