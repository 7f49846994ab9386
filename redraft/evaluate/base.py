"""What is asked: items with a grader make a task, and an item with a seed is a question.

The items of a public benchmark are rows of a file in a directory, or of a data set that the hub has by name.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from redraft.errors import RedraftError, UsageError


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


@dataclass(frozen=True)
class Question:
    """One item of one task with the seed that every arm starts from."""

    task: Task
    item: Item
    seed: int


def ask(tasks: Iterable[Task], limit: int, seed: int) -> list[Question]:
    """The first `limit` questions of every task."""
    return [Question(task, item, item_seed(seed, i)) for task in tasks for i, item in enumerate(task.items(limit))]


def item_seed(seed: int, index: int) -> int:
    """The seed of item `index`: the same whatever the batch size, the limit and the other items."""
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Benchmark:
    """A task whose items are rows: of `file` (JSON lines, .gz or not) in the directory `data`, or of a data set."""

    name: str
    file: str
    hub: str  # the data set's name
    config: str | None = None
    fields: tuple[str, ...]  # text that every row has

    def __init__(self, data: Path | None = None) -> None:
        self.data = data

    def items(self, limit: int) -> list[Item]:
        return [self.item(f"{self.name}/{index}", row) for index, row in enumerate(self.rows(limit))]

    def item(self, id: str, row: dict[str, str]) -> Item:
        """What a row asks and expects."""
        raise NotImplementedError

    def rows(self, limit: int) -> list[dict[str, str]]:
        """The first `limit` rows. Raises UsageError or RedraftError: which file and line, or what to install."""
        path = self.data / self.file if self.data else None
        found = list(islice(_read_lines(path) if path else self._from_hub(), limit))
        for number, row in enumerate(found, 1):
            missing = [f for f in self.fields if not isinstance(row, dict) or not isinstance(row.get(f), str)]
            if missing:
                raise RedraftError(f"{path or self.hub}: row {number} lacks the text field {', '.join(missing)}")
        return found

    def _from_hub(self) -> Iterable[Any]:
        instead = f"give --data DIR with {self.file} in it"
        try:
            import datasets
        except ImportError:
            missing = "the library datasets, which is not installed; run pip install datasets"
            raise UsageError(f"{self.hub} is read through {missing}, or {instead}") from None
        try:
            return datasets.load_dataset(self.hub, self.config, split="test")
        except Exception as e:
            found = f"could not be loaded from the hub ({type(e).__name__}: {e})"
            raise RedraftError(f"{self.hub} {found}; {instead}") from None


def _read_lines(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise UsageError(f"{path} does not exist; --data needs a directory that holds {path.name}")
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            lines = file.read().split("\n")
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise RedraftError(f"{path} is damaged ({e}); fetch it again") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as e:
                raise RedraftError(f"{path}: line {number} is not JSON ({e})") from None
