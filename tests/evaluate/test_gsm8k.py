"""GSM8K: the number that an answer states, and what it does not state."""

import json
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redraft.evaluate.base import Item
from redraft.evaluate.gsm8k import Gsm8k, extract_number, last_boxed

RIGHT_1200 = [
    "Ann earns 3 * 400 = 1200.\n\n\\boxed{1200}", "\\boxed{1,200}", "\\boxed{1{,}200}", "\\boxed{1\\,200}",
    "\\boxed{\\$1,200.00}", "\\boxed{ 1200 \\text{ dollars} }", "\\boxed{3 \\times 400 = 1200}",
    "$\\boxed{\\text{Total} = \\$1200}$", "It is \\boxed{7}. No, wait: \\boxed{1200}. I used 7 steps.",
    "3 * 400 = 1200\n#### 1,200", "#### $1200.", "The answer is 1200.", "The answer is $1,200. She started with 5.",
    "**Answer:** 1,200 dollars a year (12 months)", "The final answer is: **$1200.00**",
    "So the answer to the question is 3 * 400 = 1,200 dollars.", "Altogether that makes 1200.",
    "She pays 3 * 400, that is $1,200 in all!", "2400/2", "\\boxed{\\frac{2400}{2}}", "The answer is 1200, not 1300.",
]  # fmt: skip
WRONG_1200 = [
    "\\boxed{120}", "\\boxed{-1200}", "\\boxed{1200.5}", "It is 1200. \\boxed{1201}", "1200\n#### 12",
    "The answer is 12.", "1200 minus 200 makes 1000", "twelve hundred", "", "\\boxed{}", "The answer is x1200",
    "12000", "1200/0.5",
]  # fmt: skip


@pytest.mark.parametrize(("answer", "right"), [*((a, True) for a in RIGHT_1200), *((a, False) for a in WRONG_1200)])
def test_answers_to_a_question_with_1200(answer: str, right: bool) -> None:
    assert (extract_number(answer) == 1200) is right


NUMBERS = {
    "-3": -3, "It fell to −10 degrees": -10, "-$5": -5, "a 10-year plan": 10, "10-3": 3, ".5 litres": Fraction(1, 2),
    "0.25": Fraction(1, 4), "3/4": Fraction(3, 4), "100,000,000": 10**8, "45%": 45, "1,2,3": 3, "5/0": 5,
}  # fmt: skip
BOXES = {
    "\\boxed{a{b}c} d": "a{b}c", "\\boxed{1} \\boxed{2}": "2", "\\boxed{1} \\boxed{2": "1",
    "\\boxed{\\{1, 2\\}}": "\\{1, 2\\}", "\\boxed{\\left\\{x\\right.}": "\\left\\{x\\right.", "\\boxed {3}": "3",
    "}} {\\boxed{4}": "4", "boxed{5}": None, "\\boxed{" * 5000: None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("read", "text", "found"),
    [*((extract_number, *each) for each in NUMBERS.items()), *((last_boxed, *each) for each in BOXES.items())],
)
def test_forms_of_numbers_and_the_last_box(read: Callable[[str], object], text: str, found: object) -> None:
    assert read(text) == found


@given(st.text(alphabet="0129,./-−$=\\{} \nboxed#answeris*\u0663", max_size=60) | st.text(max_size=60))
def test_any_text_gives_a_number_or_none(text: str) -> None:
    assert isinstance(extract_number(text), Fraction | None)


LONG = ["1" * 10**5, "answer " * 10**4, "1," * 10**5, "#### " + "9" * 5000, "\\frac{" * 10**4]


@pytest.mark.parametrize("text", LONG)
def test_long_texts_take_no_time(text: str) -> None:
    started = time.monotonic()
    extract_number(text)
    assert time.monotonic() - started < 2


def test_items_from_a_file(tmp_path: Path) -> None:
    asked = "Tom has 2 pens and buys 3. How many has he?"
    answers = {asked: "2 + 3 = <<2+3=5>>5\n#### 5", "And a thousand more? ": "#### 1,005"}
    rows = (json.dumps({"question": question, "answer": answer}) for question, answer in answers.items())
    (tmp_path / "gsm8k_test.jsonl").write_text("".join(f"{row}\n" for row in rows))
    task = Gsm8k(tmp_path)
    first, second = task.items(10)
    prompt = f"{asked}\n\nReason step by step, and put the final number in \\boxed{{}}."
    assert first == Item("gsm8k/0", prompt, "5")
    assert second.expected == "1,005"
    assert task.items(1) == [first]
    assert task.grade(second, "\\boxed{1005}")
    assert not task.grade(second, "\\boxed{1006}")
    assert not task.grade(second, "")
