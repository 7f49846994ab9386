"""`redraft demo`: three graded answers and the sizes; a wrong answer is said and fails the command."""

import pytest
from cli.conftest import Run
from cli.fake_engine import FakeEngine

from redraft.cli.demo import DEMO_TASKS
from redraft.evaluate.demo import TASKS

ITEMS = {name: TASKS[name].items(1)[0] for name in DEMO_TASKS}
SIZES = {"experts": {"bf16": 8_000_000, "w4": 2_000_000}, "model": {"bf16": 10_000_000, "w4": 4_000_000}}
ANSWERS = {item.prompt: item.expected for item in ITEMS.values()}


@pytest.fixture
def clever(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Knows the answers of the demo's prompts."""
    monkeypatch.setattr(engine, "answer_to", lambda prompt: ANSWERS[prompt])
    monkeypatch.setattr("redraft.cli.demo.sizes", lambda: SIZES)
    return engine


def test_three_correct_answers_and_the_sizes(run: Run, clever: FakeEngine) -> None:
    outcome = run("demo")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0] == f"[arithmetic] {ITEMS['arithmetic'].prompt}"
    assert lines.count("=> correct") == 3
    assert outcome.out.count(" tok/s · ") == 3
    assert lines[-2:] == [
        "experts  w4    2.0 MB  BF16    8.0 MB  (4.00x smaller)",
        "model    w4    4.0 MB  BF16   10.0 MB  (2.50x smaller)",
    ]
    assert "\x1b" not in outcome.out


def test_a_wrong_answer_is_said_and_exits_1(run: Run, clever: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {**ANSWERS, ITEMS["edit"].prompt: "nonsense"}
    monkeypatch.setattr(clever, "answer_to", lambda prompt: wrong[prompt])
    outcome = run("demo")
    assert outcome.code == 1
    assert outcome.out.count("=> correct") == 2
    assert f"nonsense\n=> incorrect, expected:\n{ITEMS['edit'].expected}\n" in outcome.out
    assert outcome.err == "redraft: error: 1 of 3 answers are wrong\n"


def test_json_holds_answers_and_sizes(run: Run, clever: FakeEngine) -> None:
    outcome = run("demo", "--json")
    assert outcome.out.count("\n") == 1
    value = outcome.json
    assert [(a["task"], a["correct"], a["text"]) for a in value["answers"]] == [
        (name, True, item.expected) for name, item in ITEMS.items()
    ]
    assert value["sizes"] == SIZES
    assert (value["model"], value["weights"]) == ("demo", "w4")
