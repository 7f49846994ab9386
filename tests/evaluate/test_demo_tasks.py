"""Graders of the demo tasks accept the reference and reject its neighbours; items come from the data file in order."""

import pytest

from redraft.errors import UsageError
from redraft.evaluate.base import Item
from redraft.evaluate.demo import TASKS

NAMES = tuple(TASKS)


@pytest.mark.parametrize("name", NAMES)
def test_items_are_taken_from_the_first_on(name: str) -> None:
    count = 832 if name == "facts" else 1000
    items = TASKS[name].items(count)
    assert len(items) == len({i.prompt for i in items}) == count
    with pytest.raises(UsageError, match=f"task {name} has only {count} held-out prompts, {count + 1} asked for"):
        TASKS[name].items(count + 1)
    assert [i.id for i in items] == [f"{name}/{n}" for n in range(len(items))]
    assert TASKS[name].items(20) == items[:20]


@pytest.mark.parametrize("name", NAMES)
def test_reference_answers_pass(name: str) -> None:
    for item in TASKS[name].items(10 if name == "code" else 300):
        assert TASKS[name].grade(item, item.expected), item


@pytest.mark.parametrize("name", NAMES)
def test_neighbouring_answers_fail(name: str) -> None:
    items = TASKS[name].items(4 if name == "code" else 100)
    assert not TASKS[name].grade(items[0], items[1].expected)
    for item in items:
        for wrong in ("", item.expected[:-1], item.expected + " and"):
            assert not TASKS[name].grade(item, wrong), (item, wrong)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("% ", "% 1"), ("> ", "> 1"), (" + ", " - "), ("range(", "range(1 + "), ("[:", "[1 + "), ("max", "min")],
)
def test_unit_tests_notice_changed_functions(right: str, wrong: str) -> None:
    items = [i for i in TASKS["code"].items(300) if right in i.expected][:2]
    assert items
    for item in items:
        assert not TASKS["code"].grade(item, item.expected.replace(right, wrong)), item


def test_arithmetic_grades_the_stated_number() -> None:
    item = Item("", "", "1 + 2 = 3. The answer is 3.")
    assert TASKS["arithmetic"].grade(item, "2 + 1 = 3. The answer is 3.")
    assert not TASKS["arithmetic"].grade(item, "1 + 2 = 3. The answer is 33.")
    assert not TASKS["arithmetic"].grade(item, "The answer is 3. Or not.")


def test_stories_must_use_the_requested_words_and_end() -> None:
    task = TASKS["stories"]
    item = task.items(1)[0]
    assert task.grade(item, item.expected)
    assert not task.grade(item, item.expected.replace(item.data[0], "Nobody"))
    assert not task.grade(item, item.expected.rsplit(" ", 3)[0])
    assert not task.grade(item, item.expected.split(".")[0] + ".")
