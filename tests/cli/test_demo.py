"""`redraft demo`: three graded answers and the sizes; a wrong answer is said and fails the command."""

import pytest
from cli.conftest import Run
from cli.fake_engine import FakeEngine

from redraft.cli.demo import DEMO_TASKS
from redraft.evaluate.demo import TASKS

ITEMS = {name: TASKS[name].items(1)[0] for name in DEMO_TASKS}
SIZES = {"experts": {"bf16": 8_000_000, "w4": 2_000_000}, "model": {"bf16": 10_000_000, "w4": 4_000_000}}


@pytest.fixture
def answers(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the engine says to the demo's prompts: what is right."""
    known = {item.prompt: item.expected for item in ITEMS.values()}
    monkeypatch.setattr(engine, "answer_to", known.get)
    monkeypatch.setattr("redraft.cli.demo.sizes", lambda: SIZES)
    return known


def test_three_correct_answers_and_the_sizes(run: Run, answers: dict[str, str]) -> None:
    outcome = run("demo")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0] == f"[arithmetic] {ITEMS['arithmetic'].prompt}"
    assert (lines.count("=> correct"), outcome.out.count(" tok/s · ")) == (3, 3)
    assert lines[-2:] == [
        "experts  w4    2.0 MB  BF16    8.0 MB  (4.00x smaller)",
        "model    w4    4.0 MB  BF16   10.0 MB  (2.50x smaller)",
    ]
    assert "\x1b" not in outcome.out


def test_a_wrong_answer_is_said_and_exits_1(run: Run, answers: dict[str, str]) -> None:
    answers[ITEMS["edit"].prompt] = "nonsense"
    outcome = run("demo")
    assert (outcome.code, outcome.err) == (1, "redraft: error: 1 of 3 answers are wrong\n")
    assert outcome.out.count("=> correct") == 2
    assert f"nonsense\n=> incorrect, expected:\n{ITEMS['edit'].expected}\n" in outcome.out


def test_json_holds_answers_and_sizes(run: Run, answers: dict[str, str]) -> None:
    outcome = run("demo", "--json")
    assert outcome.out.count("\n") == 1
    given = [(a["task"], a["correct"], a["text"]) for a in outcome.json["answers"]]
    assert given == [(name, True, item.expected) for name, item in ITEMS.items()]
    assert (outcome.json["sizes"], outcome.json["model"], outcome.json["weights"]) == (SIZES, "demo", "w4")
