"""What is asked: items with a grader make a task, and an item with a seed is a question."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Item:
    """One prompt, sent as a single user turn. `expected` is the reference answer; `data` is for the task's grader."""

    id: str
    prompt: str
    expected: str
    data: Any = None


class Task(Protocol):
    """Items and a grader. Both depend on nothing but the task."""

    name: str
    description: str

    def items(self, limit: int) -> Sequence[Item]:
        """The first `limit` items, or all if there are fewer. Raises UsageError when they cannot be read."""

    def grade(self, item: Item, answer: str, ended: bool = True) -> bool:
        """Whether `answer` is right. ended: the model closed it, the token limit did not cut it. Never raises."""
        ...


@dataclass(frozen=True)
class Question:
    """One item of one task with the seed that every arm starts from."""

    task: Task
    item: Item
    seed: int


def ask(tasks: Iterable[Task], limit: int, seed: int) -> list[Question]:
    """The first `limit` questions of every task."""
    return [
        Question(task, item, item_seed(seed, index)) for task in tasks for index, item in enumerate(task.items(limit))
    ]


def item_seed(seed: int, index: int) -> int:
    """The seed of item `index`: the same whatever the batch size, the limit and the other items."""
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
