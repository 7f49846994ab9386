"""Graders of the demo tasks accept the reference and reject its neighbours; items come from the data file in order."""

import pytest

from redraft.errors import UsageError
from redraft.evaluate.base import Item
from redraft.evaluate.demo import TASKS


@pytest.mark.parametrize("name", TASKS)
def test_items_are_taken_from_the_first_on(name: str) -> None:
    count = 832 if name == "facts" else 1000
    items = TASKS[name].items(count)
    assert len(items) == len({i.prompt for i in items}) == count
    with pytest.raises(UsageError, match=f"task {name} has only {count} held-out prompts, {count + 1} asked for"):
        TASKS[name].items(count + 1)
    assert [i.id for i in items] == [f"{name}/{n}" for n in range(len(items))]
    assert TASKS[name].items(20) == items[:20]


@pytest.mark.parametrize("name", TASKS)
def test_reference_answers_pass_and_their_neighbours_fail(name: str) -> None:
    task, right, wrong = TASKS[name], *((10, 4) if name == "code" else (300, 100))
    items = task.items(right)
    for item in items:
        assert task.grade(item, item.expected), item
    assert not task.grade(items[0], items[1].expected)
    for item in items[:wrong]:
        for answer in ("", item.expected[:-1], item.expected + " and"):
            assert not task.grade(item, answer), (item, answer)


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
    answers = ("2 + 1 = 3. The answer is 3.", "1 + 2 = 3. The answer is 33.", "The answer is 3. Or not.")
    assert [TASKS["arithmetic"].grade(item, answer) for answer in answers] == [True, False, False]


def test_stories_must_use_the_requested_words_and_end() -> None:
    (item,) = TASKS["stories"].items(1)
    story = item.expected
    answers = (story, story.replace(item.data[0], "Nobody"), story.rsplit(" ", 3)[0], story.split(".")[0] + ".")
    assert [TASKS["stories"].grade(item, answer) for answer in answers] == [True, False, False, False]
