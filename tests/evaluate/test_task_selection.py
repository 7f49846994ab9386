"""Tasks by name, where their rows come from, and the everyday questions."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from redraft.errors import RedraftError, UsageError
from redraft.evaluate.everyday import Everyday
from redraft.evaluate.source import Benchmark
from redraft.evaluate.tasks import NAMES, select_tasks


class Rows(Benchmark):
    name, file, hub, config, fields = "rows", "rows.jsonl", "owner/rows", "main", ("question",)


class PackedRows(Rows):
    file = "rows.jsonl.gz"


@pytest.mark.parametrize("name", NAMES)
def test_select_a_benchmark(name: str) -> None:
    tasks = select_tasks(name)
    assert list(tasks) == [tasks[name].name] == [name]
    assert tasks[name].description


def test_select_demo_tasks() -> None:
    assert list(select_tasks("demo:edit")) == ["edit"]
    assert list(select_tasks("demo:all")) == ["arithmetic", "edit", "lists", "facts", "stories", "code"]


@pytest.mark.parametrize("spec", ["demo:none", "edit", "gsm8k:main", "demo:", "", "GSM8K"])
def test_unknown_tasks_are_refused_with_the_names(spec: str) -> None:
    with pytest.raises(UsageError, match="expected one of gsm8k, humaneval, math500, everyday, demo:arithmetic"):
        select_tasks(spec)


def test_everyday_asks_for_a_finished_answer() -> None:
    task = Everyday()
    items = task.items(1000)
    assert len(items) >= 20
    assert len({item.prompt for item in items}) == len(items) == len({item.id for item in items})
    assert all(len(item.prompt) < 150 for item in items)
    assert task.items(2) == items[:2]
    assert task.grade(items[0], "Six minutes.", ended=True)
    assert not task.grade(items[0], "Six minutes and then", ended=False)
    assert not task.grade(items[0], " \n", ended=True)


def test_rows_from_plain_and_compressed_files(tmp_path: Path) -> None:
    text = "".join(json.dumps({"question": q}) + "\n" for q in ("a", "b\u2028c", "d")) + "\n"
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    assert [r["question"] for r in Rows(tmp_path).rows(9)] == ["a", "b\u2028c", "d"]
    assert len(Rows(tmp_path).rows(2)) == 2
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert PackedRows(tmp_path).rows(9) == Rows(tmp_path).rows(9)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"question": "a"}\n{"quest', r"rows.jsonl: line 2 is not JSON"),
        (b'{"question": "a"}\n{"other": "b"}\n', r"rows.jsonl: row 2 lacks the text field question"),
        (b'{"question": 3}\n', "row 1 lacks the text field question"),
        (b"[1]\n", "row 1 lacks"),
        (b"\xff\xfe\n", "rows.jsonl is damaged"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(RedraftError, match=message):
        Rows(tmp_path).rows(9)


def test_a_truncated_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"question": "a"}\n' * 100)[:-12])
    with pytest.raises(RedraftError, match=r"rows.jsonl.gz is damaged"):
        PackedRows(tmp_path).rows(9)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"rows.jsonl does not exist; --data needs a directory that holds rows.jsonl"):
        Rows(tmp_path).rows(9)


def hub(monkeypatch: pytest.MonkeyPatch, load: Callable[..., Any]) -> None:
    """Take the place of the library datasets."""
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))


def test_without_a_directory_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    hub(monkeypatch, lambda *args, **kwargs: asked.append((args, kwargs)) or [{"question": "a"}, {"question": "b"}])
    assert Rows().rows(1) == [{"question": "a"}]
    assert asked == [(("owner/rows", "main"), {"split": "test"})]


def test_an_unreachable_hub_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route")

    hub(monkeypatch, fail)
    message = r"owner/rows could not be loaded from the hub \(ConnectionError: no route\); give --data DIR"
    with pytest.raises(RedraftError, match=message):
        Rows().rows(1)


def test_without_the_library_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # import datasets fails
    with pytest.raises(UsageError, match=r"pip install datasets, or give --data DIR with rows.jsonl in it"):
        Rows().rows(1)
