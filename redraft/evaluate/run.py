"""Evaluate an engine on tasks: answers, grades, figures and a file of results that survives an interruption.

Nothing here knows a model or a task: an engine answers prompts, a task gives items and grades answers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from redraft.errors import RedraftError, UsageError
from redraft.evaluate.statistics import percentile, wilson_interval

if TYPE_CHECKING:
    from redraft.engine.engine import Engine
    from redraft.engine.events import Result
    from redraft.evaluate.tasks import Item, Task


@dataclass(frozen=True)
class Record:
    """One graded answer.

    `seconds` is the item's share of its batch's wall time, so that a sum is the time spent; `answer_seconds` is what
    the answer took from request to end, in a batch as long as the batch.
    """

    id: str
    task: str
    prompt: str
    answer: str
    expected: str
    correct: bool
    tokens: int
    forwards: int
    tokens_per_forward: float  # padding inside an answer is no token here
    steps_per_canvas: list[int]
    finish_reason: str
    seconds: float
    answer_seconds: float
    seed: int


R = TypeVar("R", bound=Record)


def item_seed(seed: int, index: int) -> int:
    """The seed of item `index`: the same whatever the batch size, the limit and the other items."""
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def evaluate(
    engine: Engine,
    task: Task,
    items: Sequence[Item],
    *,
    seed: int = 0,
    batch_size: int = 1,
    settings: Mapping[str, Any] | None = None,
    skip: Container[str] = (),
) -> Iterator[Record]:
    """Answer and grade `items` in order, a batch at a time; yields one record each, leaving out ids in `skip`."""
    open_items = [(i, item) for i, item in enumerate(items) if item.id not in skip]
    for start in range(0, len(open_items), batch_size):
        batch = open_items[start : start + batch_size]
        seeds = [item_seed(seed, i) for i, _ in batch]
        began = time.perf_counter()
        results = engine.generate_batch([item.prompt for _, item in batch], seed=seeds, **(settings or {}))
        share = (time.perf_counter() - began) / len(batch)
        for (_, item), result in zip(batch, results, strict=True):
            yield Record(**graded(task, item, result), seconds=share, answer_seconds=result.seconds)


def graded(task: Task, item: Item, result: Result) -> dict[str, Any]:
    """A record's fields but for the times: the answer, its grade and what it cost."""
    return {
        "id": item.id,
        "task": task.name,
        "prompt": item.prompt,
        "answer": result.text,
        "expected": item.expected,
        "correct": task.grade(item, result.text, ended=result.finish_reason == "stop"),
        "tokens": result.tokens,
        "forwards": result.forwards,
        "tokens_per_forward": result.tokens_per_forward,
        "steps_per_canvas": list(result.steps_per_canvas),
        "finish_reason": result.finish_reason,
        "seed": result.seed,
    }


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """Accuracy with its 95 % interval, speed and steps of at least one record, as a JSON-ready dict."""
    correct, tokens = sum(r.correct for r in records), sum(r.tokens for r in records)
    forwards, seconds = sum(r.forwards for r in records), sum(r.seconds for r in records)
    steps = [s for r in records for s in r.steps_per_canvas]
    return {
        "items": len(records),
        "correct": correct,
        "accuracy": correct / len(records),
        "interval": list(wilson_interval(correct, len(records))),
        "tokens": tokens,
        "forwards": forwards,
        "tokens_per_forward": sum(r.tokens_per_forward * r.forwards for r in records) / forwards,
        "tokens_per_second": tokens / seconds,
        "steps_per_canvas": {
            "mean": sum(steps) / len(steps),
            "p50": percentile(steps, 50),
            "p90": percentile(steps, 90),
        },
        "answer_seconds": {
            "mean": sum(r.answer_seconds for r in records) / len(records),
            "p50": percentile([r.answer_seconds for r in records], 50),
            "p90": percentile([r.answer_seconds for r in records], 90),
        },
        "cut_off": sum(r.finish_reason == "length" for r in records),
        "seconds": seconds,
    }


def run_id(description: Mapping[str, Any]) -> str:
    """A short name of everything that decides a run's results, to keep records of different runs apart."""
    return hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode()).hexdigest()[:12]


class ResultsFile(Generic[R]):
    """Per-item JSON lines of one kind of record. They gather in `<path>.part`, and take the final name at the end.

    Opening it again after an interruption gives the records of the same run in `done`. Raises UsageError when `path`
    is there already or `<path>.part` belongs to another run, RedraftError when a line of it is damaged.
    """

    def __init__(self, path: Path, run: str, kind: type[R]) -> None:
        self.path = path
        self.run = run
        self.kind = kind
        self.part = part_path(path)
        check_target(path)
        self.done: list[R] = self._read()
        self._file = self.part.open("a", encoding="utf-8")

    def append(self, record: R) -> None:
        line = json.dumps({**dataclasses.asdict(record), "run": self.run}, ensure_ascii=False)
        self._file.write(line + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        if error is None:
            self.part.replace(self.path)

    def _read(self) -> list[R]:
        if not self.part.exists():
            return []
        data = self.part.read_bytes()
        complete = data.rfind(b"\n") + 1
        if complete < len(data):  # the line that was being written when the run ended
            os.truncate(self.part, complete)
        return read_results(self.part, self.run, self.kind)


def read_results(path: Path, run: str, kind: type[R]) -> list[R]:
    """The records of a results file. Raises UsageError for another run's, RedraftError for a damaged line."""
    # Not splitlines(), which also cuts at line separators inside an answer.
    lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    return [_parse(line, path, i, run, kind) for i, line in enumerate(lines, 1) if line]


def _parse(line: str, path: Path, number: int, run: str, kind: type[R]) -> R:
    try:
        raw = json.loads(line)
        found = raw.pop("run")
        record = kind(**raw)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise RedraftError(f"{path}: line {number} is not a result; remove the file to start afresh") from None
    if found != run:
        raise UsageError(
            f"{path} holds results of another model, seed, task or setting; remove it or choose another file"
        )
    return record


def part_path(path: Path) -> Path:
    """Where the results of an unfinished run are kept."""
    return path.with_name(path.name + ".part")


def check_target(path: Path) -> None:
    """Raise UsageError unless results can be written to `path` without losing others."""
    if path.exists():
        raise UsageError(f"{path} already exists; remove it or choose another file")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: the directory {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path}: the directory {path.parent} is not writable")
