"""Tasks by name, where their rows come from, and the everyday questions."""

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from redraft.errors import RedraftError, UsageError
from redraft.evaluate.base import Benchmark
from redraft.evaluate.everyday import Everyday
from redraft.evaluate.tasks import BENCHMARKS, select_tasks

CUT_GZIP = gzip.compress(b'{"question": "a"}\n' * 100, mtime=0)[:-12]  # without a time: alike in every process


class Rows(Benchmark):
    name, file, hub, config, fields = "rows", "rows.jsonl", "owner/rows", "main", ("question",)


class PackedRows(Rows):
    file = "rows.jsonl.gz"


DEMO = {"demo:edit": ["edit"], "demo:all": ["arithmetic", "edit", "lists", "facts", "stories", "code"]}


@pytest.mark.parametrize(("spec", "names"), [*((name, [name]) for name in BENCHMARKS), *DEMO.items()])
def test_tasks_by_name(spec: str, names: list[str]) -> None:
    tasks = select_tasks(spec)
    assert list(tasks) == [task.name for task in tasks.values()] == names
    assert all(task.description for task in tasks.values())


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
    ("source", "content", "error", "message"),
    [
        (Rows, b'{"question": "a"}\n{"quest', RedraftError, "rows.jsonl: line 2 is not JSON"),
        (Rows, b'{"question": "a"}\n{"other": "b"}\n', RedraftError, "rows.jsonl: row 2 lacks the text field question"),
        (Rows, b'{"question": 3}\n', RedraftError, "row 1 lacks the text field question"),
        (Rows, b"[1]\n", RedraftError, "row 1 lacks"), (Rows, b"\xff\xfe\n", RedraftError, "rows.jsonl is damaged"),
        (PackedRows, CUT_GZIP, RedraftError, "rows.jsonl.gz is damaged"),
        (Rows, None, UsageError, "rows.jsonl does not exist; --data needs a directory that holds rows.jsonl"),
    ],
)  # fmt: skip
def test_damaged_and_missing_files_are_named(
    tmp_path: Path, source: type[Rows], content: bytes | None, error: type[RedraftError], message: str
) -> None:
    if content is not None:
        (tmp_path / source.file).write_bytes(content)
    with pytest.raises(error, match=message):
        source(tmp_path).rows(9)


def test_without_a_directory_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    load = MagicMock(return_value=[{"question": "a"}, {"question": "b"}])
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    assert Rows().rows(1) == [{"question": "a"}]
    load.assert_called_once_with("owner/rows", "main", split="test")
    load.side_effect = ConnectionError("no route")
    message = r"owner/rows could not be loaded from the hub \(ConnectionError: no route\); give --data DIR"
    with pytest.raises(RedraftError, match=message):
        Rows().rows(1)
    monkeypatch.setitem(sys.modules, "datasets", None)  # import datasets fails
    with pytest.raises(UsageError, match=r"pip install datasets, or give --data DIR with rows.jsonl in it"):
        Rows().rows(1)
