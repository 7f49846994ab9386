"""Answers on disk: a file of lines that survives a kill, and the folder of a comparison around it."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self, TextIO

from redraft.config import read_json
from redraft.errors import RedraftError, UsageError
from redraft.evaluate.run import Record
from redraft.files import write_text


def run_id(description: Any) -> str:
    """A short name of everything that decides a run's results, to keep records of different runs apart."""
    return hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode()).hexdigest()[:12]


class Results:
    """The answers of a run, as JSON lines in a file. They gather in `<path>.part`, and take the final name at the end.

    Opening it again after an interruption gives those of the same run in `records`, where new ones follow. path None:
    nothing is written. Raises UsageError when `path` is there already or `<path>.part` belongs to another run,
    RedraftError when a line of it is damaged.
    """

    def __init__(self, path: Path | None, run: str) -> None:
        self.path, self.run = path, run
        self.records: list[Record] = []
        self._file: TextIO | None = None
        if path is not None:
            check_target(path)
            part = part_path(path)
            if part.exists():  # without the line that was being written when the run ended
                os.truncate(part, part.read_bytes().rfind(b"\n") + 1)
                self.records = read_results(part, run)
            self._file = part.open("a", encoding="utf-8")

    @property
    def done(self) -> set[tuple[str, str]]:
        """What needs no answer: arm name and item id."""
        return {(r.arm, r.id) for r in self.records}

    def gather(self, records: Iterable[Record], told: Callable[[Record], object]) -> list[Record]:
        """Keep each record as it comes and tell of it; returns all there are."""
        for record in records:
            self.append(record)
            told(record)
        return self.records

    def append(self, record: Record) -> None:
        if self._file:
            self._file.write(json.dumps({**record.to_dict(), "run": self.run}, ensure_ascii=False) + "\n")
            self._file.flush()
        self.records.append(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._file and self.path:
            with self._file:
                os.fsync(self._file.fileno())
            if error is None:
                part_path(self.path).replace(self.path)


def read_results(path: Path, run: str) -> list[Record]:
    """The records of a results file. Raises UsageError for another run's, RedraftError for a damaged line."""
    records = []
    # Not splitlines(), which also cuts at line separators inside an answer.
    for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").split("\n"), 1):
        if line:
            try:
                raw = json.loads(line)
                found = raw.pop("run")
                records.append(Record(**raw))
            except (ValueError, TypeError, KeyError, AttributeError):
                raise RedraftError(f"{path}: line {number} is not a result; remove the file to start afresh") from None
            if found != run:
                raise UsageError(
                    f"{path} holds results of another model, seed, task or setting; remove it or choose another file"
                )
    return records


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


class Folder:
    """Where a comparison lives: run.json says what it is, items.jsonl holds an answer a line.

    identity: everything that decides the results. A folder of the same identity is taken up where it was left. Raises
    UsageError that names what differs when it holds another comparison.
    """

    def __init__(self, path: Path, identity: dict[str, Any]):
        self.path, self.run = path, run_id(identity)
        self.items, self._about = path / "items.jsonl", path / "run.json"
        self._identity = json.loads(json.dumps(identity, default=str))
        self.facts: dict[str, Any] = {}
        if self._about.exists():
            found = read_json(self._about)
            there, here = _flat(found.get("identity")), _flat(self._identity)
            for key in (*there, *here):
                if there.get(key) != here.get(key):
                    raise UsageError(
                        f"{path} holds another comparison: {key} is {there.get(key)} there and {here.get(key)} now; "
                        "give --out another directory, or remove this one"
                    )
            self.facts = found.get("facts", {})
        elif path.exists() and any(path.iterdir()):
            raise UsageError(f"{path} holds other files; give --out another directory")

    def note(self, **facts: Any) -> None:
        """Keep facts about the run for its report, such as the machine's limits."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.facts |= facts
        write_text(self._about, json.dumps({"identity": self._identity, "facts": self.facts}, indent=2) + "\n")

    def finished(self) -> list[Record] | None:
        """All answers of a comparison that is complete, None of another."""
        return read_results(self.items, self.run) if self.items.exists() else None


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested dicts as one with dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for key, each in value.items() for k, v in _flat(each, f"{name}.{key}" if name else key).items()}
