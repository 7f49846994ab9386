"""The harness without a network: seeds, batches, grades and turns."""

from typing import Any

import pytest
from cli.fake_engine import FakeEngine
from evaluate.answers import Echo

from redraft.evaluate.base import ask, item_seed
from redraft.evaluate.run import Record, evaluate, turns

QUESTIONS = ask([Echo()], 5, seed=9)


def answers(engine: FakeEngine | None = None, count: int = 5, **options: Any) -> list[Record]:
    return list(evaluate(engine or FakeEngine(), QUESTIONS[:count], **options))  # type: ignore[arg-type]


def test_records_carry_the_answer_its_grade_and_its_seed() -> None:
    engine = FakeEngine()
    records = answers(engine, batch_size=2)
    assert engine.batches == [2, 2, 1]
    assert [r.correct for r in records] == [True, False, True, False, True]
    first = records[0]
    assert (first.id, first.prompt, first.answer, first.expected) == ("echo/0", "0", "You said: 0", "You said: 0")
    assert (first.tokens, first.forwards, first.steps_per_canvas, first.finish_reason) == (12, 2, [2], "stop")
    assert [r.seed for r in records] == [item_seed(9, i) for i in range(5)]
    assert all(r.answer_seconds >= 0.5 for r in records)  # the fake engine's own clock
    (cut,) = answers(count=1, settings={"max_new_tokens": 11})  # reaches the grader as cut
    assert (cut.answer, cut.finish_reason, cut.correct) == ("You said: 0", "length", False)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("done", [set(), {0, 3}])
def test_results_do_not_depend_on_batch_size_or_on_what_is_done(batch_size: int, done: set[int]) -> None:
    records = answers(batch_size=batch_size, done={("", f"echo/{i}") for i in done})
    left = [r for i, r in enumerate(answers(batch_size=5)) if i not in done]
    assert [(r.id, r.answer, r.seed) for r in records] == [(r.id, r.answer, r.seed) for r in left]


def test_a_batch_is_of_one_task_and_filled_with_what_is_left() -> None:
    engine, two = FakeEngine(), ask([Echo(), type("Other", (Echo,), {"name": "other"})()], 3, seed=0)
    list(evaluate(engine, two, batch_size=2))  # type: ignore[arg-type]
    assert engine.batches == [2, 1, 2, 1]
    engine.batches.clear()
    answers(engine, batch_size=2, done={("", "echo/1")})
    assert engine.batches == [2, 2]


def test_item_seeds_are_fixed_distinct_and_in_range() -> None:
    assert item_seed(0, 0) == 3065247057545751466  # half of the first 8 bytes of sha256("0/0")
    seeds = {item_seed(s, i) for s in range(20) for i in range(200)}
    assert len(seeds) == 4000
    assert all(0 <= s < 2**63 for s in seeds)


def test_turns_alternate_so_that_places_balance() -> None:
    arms = ["bf16", "w4", "turbo"]
    orders = [turns(arms, i) for i in range(4)]
    assert orders == [["bf16", "w4", "turbo"], ["turbo", "w4", "bf16"]] * 2
    assert len({sum(order.index(arm) for order in orders) for arm in arms}) == 1
