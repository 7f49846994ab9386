"""What stays on disk: lines that survive a kill, and the folder of a comparison."""

import json
from pathlib import Path
from typing import Any

import pytest
from evaluate.answers import record

from redraft.errors import RedraftError, UsageError
from redraft.evaluate.results import Folder, Results, part_path, run_id


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "r.jsonl"


def test_run_id_depends_on_every_value_and_not_on_their_order() -> None:
    assert run_id({"a": 1, "b": [2]}) == run_id({"b": [2], "a": 1})
    assert run_id({"a": 1}) != run_id({"a": 2})
    assert len(run_id({})) == 12


def test_results_take_their_name_when_complete(path: Path) -> None:
    with Results(path, "run") as file:
        assert file.records == []
        file.append(record(answer="é\n"))
        assert not path.exists()
    found = json.loads(path.read_text())
    assert (found["answer"], found["run"]) == ("é\n", "run")
    assert not part_path(path).exists()


def test_the_same_run_goes_on_without_a_line_cut_in_the_middle(path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Results(path, "run") as file:
        file.append(record())
        raise KeyboardInterrupt
    with pytest.raises(UsageError, match="another model, seed, task or setting"):
        Results(path, "other")
    with part_path(path).open("a") as part:
        part.write('{"id": "t/1", "ta')
    with Results(path, "run") as file:
        assert file.records == [record()]
        file.append(record(id="t/1"))
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["t/0", "t/1"]


@pytest.mark.parametrize("line", ['{"id": 3}\n', '{"run": "run"}\n'])
def test_a_damaged_line_is_named_and_left_alone(path: Path, line: str) -> None:
    part_path(path).write_text(line)
    with pytest.raises(RedraftError, match=r"r.jsonl.part: line 1 is not a result"):
        Results(path, "run")
    assert part_path(path).read_text() == line


IDENTITY = {"model": "demo", "limit": 3, "settings": {"w4": {"entropy_bound": 0.1}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limit": 4}, "limit is 3 there and 4 now"),
        ({"settings": {"w4": {"entropy_bound": 0.2}}}, "settings.w4.entropy_bound is 0.1 there and 0.2 now"),
        ({"fixed_steps": 4}, "fixed_steps is None there and 4 now"),
    ],
)
def test_another_comparison_is_refused_by_what_differs(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    Folder(tmp_path / "ab", IDENTITY).note(about={})
    with pytest.raises(UsageError, match=message):
        Folder(tmp_path / "ab", {**IDENTITY, **changes})


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(UsageError, match="holds other files"):
        Folder(tmp_path, IDENTITY)
