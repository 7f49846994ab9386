"""`redraft demo`: three graded answers and the sizes; a wrong answer is said and fails the command."""

from __future__ import annotations

import json

import pytest
from cli.conftest import Run
from cli.fake_engine import FakeEngine, fake_weights

from redraft.cli.demo import DEMO_TASKS, Sizes, measure
from redraft.demo.tasks import TASKS

ITEMS = {name: TASKS[name].heldout_items(1)[0] for name in DEMO_TASKS}
ANSWERS = {item.prompt: item.answer for item in ITEMS.values()}


@pytest.fixture
def clever(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Knows the answers of the demo's prompts, but for those in `wrong`."""
    monkeypatch.setattr(engine, "answer_to", lambda prompt: ANSWERS[prompt])
    return engine


def test_three_correct_answers_and_the_sizes(run: Run, clever: FakeEngine) -> None:
    outcome = run("demo")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0] == f"[arithmetic] {ITEMS['arithmetic'].prompt}"
    assert lines.count("=> correct") == 3
    assert outcome.out.count(" tok/s · ") == 3
    assert lines[-2:] == [
        "experts w4 224 bytes, BF16 384 bytes (1.71x)",
        "model   w4 284 bytes, BF16 444 bytes (1.56x)",
    ]
    assert "\x1b" not in outcome.out


def test_a_wrong_answer_is_said_and_exits_1(run: Run, clever: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {**ANSWERS, ITEMS["edit"].prompt: "nonsense"}
    monkeypatch.setattr(clever, "answer_to", lambda prompt: wrong[prompt])
    outcome = run("demo")
    assert outcome.code == 1
    assert outcome.out.count("=> correct") == 2
    assert f"nonsense\n=> incorrect, expected:\n{ITEMS['edit'].answer}\n" in outcome.out
    assert outcome.err == "redraft: error: 1 of 3 answers are wrong\n"


def test_json_holds_answers_and_sizes(run: Run, clever: FakeEngine) -> None:
    outcome = run("demo", "--json")
    assert outcome.out.count("\n") == 1
    value = json.loads(outcome.out)
    assert [(a["task"], a["correct"], a["text"]) for a in value["answers"]] == [
        (name, True, item.answer) for name, item in ITEMS.items()
    ]
    assert value["sizes"] == {"experts_bf16": 384, "experts": 224, "model_bf16": 444, "model": 284}
    assert (value["model"], value["weights"]) == ("demo", "w4")


def test_sizes_count_two_bytes_a_weight_outside_the_experts() -> None:
    # Packed: 2*8*4 + 2*8*2 = 96 bytes of nibbles, 4 * 2*8 fp16 = 128 bytes of scales and zero points. Rest: 30 weights.
    assert measure(fake_weights()) == Sizes(experts_bf16=384, experts=224, model_bf16=444, model=284)  # type: ignore[arg-type]
    assert measure(fake_weights(packed=False)) == Sizes(384, 384, 444, 444)  # type: ignore[arg-type]
