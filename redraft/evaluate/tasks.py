"""Tasks by name: what an item is, what a task does, and which tasks there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from redraft.errors import UsageError

NAMES = ("gsm8k", "humaneval", "math500", "everyday")


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
        ...

    def grade(self, item: Item, answer: str, ended: bool = True) -> bool:
        """Whether `answer` is right. ended: the model closed it, the token limit did not cut it. Never raises."""
        ...


def select_tasks(spec: str, data: Path | None = None) -> dict[str, Task]:
    """The tasks that a name, `demo:<name>` or `demo:all` stands for, by name.

    data: the directory that benchmark files are read from; without it they come from the hub. Raises UsageError listing
    the names there are.
    """
    from redraft.evaluate.demo import TASKS as DEMO

    suite, _, name = spec.partition(":")
    if suite == "demo" and name in (*DEMO, "all"):
        return {n: DEMO[n] for n in (DEMO if name == "all" else (name,))}
    if spec in NAMES:
        return {spec: _benchmark(spec, data)}
    known = (*NAMES, *(f"demo:{n}" for n in (*DEMO, "all")))
    raise UsageError(f"task is {spec!r}, expected one of {', '.join(known)}")


def _benchmark(name: str, data: Path | None) -> Task:
    from redraft.evaluate.everyday import Everyday
    from redraft.evaluate.gsm8k import Gsm8k
    from redraft.evaluate.humaneval import HumanEval
    from redraft.evaluate.math500 import Math500

    if name == "everyday":
        return Everyday()
    benchmarks: dict[str, Callable[[Path | None], Task]] = {"gsm8k": Gsm8k, "humaneval": HumanEval, "math500": Math500}
    return benchmarks[name](data)
