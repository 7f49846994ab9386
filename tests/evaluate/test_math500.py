"""MATH-500: equal values written differently, and answers made to break the comparison."""

import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from redraft.errors import UsageError
from redraft.evaluate.math500 import Math500, Verifier


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    pytest.importorskip("math_verify")
    yield Verifier(seconds=5.0)


RIGHT = [
    ("\\frac{14}{3}", "So it is \\boxed{\\frac{14}{3}}."), ("\\frac{14}{3}", "\\boxed{14/3}"),
    ("\\frac{14}{3}", "\\boxed{\\dfrac{28}{6}}"), ("\\frac12", "The result is \\boxed{0.5}"),
    ("2\\sqrt{2}", "\\boxed{\\sqrt{8}}"), ("p - q", "\\boxed{-q + p}"),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "\\boxed{(3, \\pi/2)}"), ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}"),
    ("90^\\circ", "\\boxed{90}"), ("10,000", "\\boxed{10000}"),
    ("5", "First \\boxed{4}. I made a mistake: \\boxed{5}"), ("5", "The answer is $5$."),
    ("[2,5)", "\\boxed{[2, 5)}"),
]  # fmt: skip
WRONG = [
    ("\\frac{14}{3}", "\\boxed{\\frac{3}{14}}"), ("\\frac{14}{3}", "\\boxed{4.67}"), ("p - q", "\\boxed{q - p}"),
    ("5", "First \\boxed{5}. No: \\boxed{4}"), ("[2,5)", "\\boxed{[2, 5]}"),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "\\boxed{(\\pi/2, 3)}"), ("\\text{Evelyn}", "\\boxed{\\text{Angela}}"),
    ("5", ""), ("5", "\\boxed{}"), ("5", "(" * 5000),
]  # fmt: skip


@pytest.mark.parametrize(
    ("reference", "answer", "right"), [*((*pair, True) for pair in RIGHT), *((*pair, False) for pair in WRONG)]
)
def test_answers(verifier: Verifier, reference: str, answer: str, right: bool) -> None:
    assert verifier.equal(reference, answer) is right


def test_an_endless_comparison_is_stopped_and_the_next_answer_is_graded() -> None:
    pytest.importorskip("math_verify")
    impatient = Verifier(seconds=1.0)
    assert impatient.equal("5", "\\boxed{5}") or impatient.equal("5", "\\boxed{5}")  # the first one may be slow
    started = time.monotonic()
    assert not impatient.equal("5", "\\boxed{9^{9^{9^{9}}}}")
    assert time.monotonic() - started < 4
    impatient.seconds = 20.0
    assert impatient.equal("5", "\\boxed{5}")


def test_answers_are_not_evaluated_as_code(verifier: Verifier, tmp_path: Path) -> None:
    target = tmp_path / "made"
    for code in (f"open('{target}','w')", f"__import__('os').mkdir('{target}')"):
        verifier.equal("5", f"\\boxed{{{code}}}")
        verifier.equal("5", code)
    assert not target.exists()


def test_items_from_a_file(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    row = {"problem": "What is $1+1$?", "solution": "It is $\\boxed{2}$.", "answer": "2", "subject": "Algebra"}
    (tmp_path / "math500_test.jsonl").write_text(json.dumps(row) + "\n")
    task = Math500(tmp_path)
    (item,) = task.items(10)
    assert (item.id, item.expected) == ("math500/0", "2")
    assert item.prompt == "What is $1+1$?\n\nReason step by step, and put the final answer in \\boxed{}."
    assert task.grade(item, row["solution"])
    assert not task.grade(item, "\\boxed{3}")


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs the library math-verify; run pip install 'redraft\[eval\]'"):
        Math500(tmp_path).items(1)
