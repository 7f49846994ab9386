"""HumanEval: the program in an answer, and a grade that only working code gets."""

import gzip
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redraft.evaluate.humaneval import HumanEval, assemble

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="resource limits as on Linux")

PROMPT = '''from typing import List


def halve(n: float) -> float:
    return n / 2


def total(values: List[int]) -> float:
    """ Half of the sum.
    >>> total([1, 3])
    2.0
    """
'''
BODY = "    result = sum(values)\n\n    return halve(result)\n"
ROW = {
    "task_id": "HumanEval/0", "prompt": PROMPT, "entry_point": "total", "canonical_solution": BODY,
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate([1, 3]) == 2.0\n"
    "    assert candidate([]) == 0, 'empty'\n    assert candidate([3]) == halve(3)\n",
}  # fmt: skip
WHOLE = PROMPT + BODY


def test_item(tmp_path: Path) -> None:
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROW).encode() + b"\n"))
    (item,) = HumanEval(tmp_path).items(10)
    assert (item.id, item.expected, item.data) == ("humaneval/0", BODY, ROW)
    assert item.prompt.startswith("Complete this Python function.")
    assert item.prompt.endswith(f"```python\n{PROMPT.rstrip()}\n```")


# Answers as models write them: each a program whose `total` is right.
RIGHT = {
    "completion": BODY,
    "completion without indentation": "result = sum(values)\nreturn halve(result)",
    "fenced function": f"Here it is:\n\n```python\n{WHOLE}```\n\nIt sums the values, then halves.",
    "function that uses the prompt": "```python\ndef total(values: List[int]):\n    return halve(sum(values))\n```",
    "fence without language": f"```\n{WHOLE}```",
    "fence in a list": "1. Code:\n   ```python\n   def total(values):\n       return sum(values) / 2\n   ```\n2. Done",
    "cut before the closing fence": f"```python\n{WHOLE}",
    "fenced completion": f"The body is\n```python\n{BODY}```",
    "function without a fence": "Sure!\n\ndef total(values):\n    return sum(values) / 2\n\nThis isn't hard, is it?",
    "completion, then prose": f"{BODY}\nThis isn't hard, is it?",
    "usage after the function": f"```python\n{WHOLE}```\nUse it:\n```python\nprint(total([1, 3]))\n```",
    "corrected later": "```python\ndef total(values):\n    return 0\n```\nWrong. Better:\n```python\ndef total(values):"
    "\n    return sum(values) / 2\n```",
    "own helper": "```python\ndef add(v):\n    return sum(v)\n\ndef total(values):\n    return add(values) / 2\n```",
    "library": "```python\nimport functools, operator\nfrom collections import Counter\n\ndef total(values):\n"
    "    return functools.reduce(operator.add, Counter(values).elements(), 0) / 2\n```",
    "main guard": f"```python\n{WHOLE}\nif __name__ == '__main__':\n    raise SystemExit(1)\n```",
    "dataclass": "```python\nfrom dataclasses import dataclass\n\n@dataclass\nclass Sum:\n    value: float\n\n"
    "def total(values):\n    return Sum(sum(values) / 2).value\n```",
    "subclass of float": "```python\nclass F(float): pass\ndef total(values):\n    return F(sum(values) / 2)\n```",
}
WRONG = {
    "nothing": "", "prose": "I am not able to do that.", "wrong body": "    return sum(values)\n",
    "no return": "    sum(values) / 2\n", "raises": "    raise NotImplementedError\n",
    "wrong at one case": "    return sum(values) / 2 if values else None\n",
    "another name": "```python\ndef totals(values):\n    return sum(values) / 2\n```",
    "syntax error": "```python\ndef total(values)\n    return sum(values) / 2\n```",
    "a later wrong definition": f"```python\n{WHOLE}\ndef total(values):\n    return 0\n```",
    "only the prompt": f"```python\n{PROMPT}```",
    "text": "    return str(sum(values) / 2)\n",
}  # fmt: skip
# A pass that is faked.
HOSTILE = {
    "exits": "import sys\nsys.exit(0)\ndef total(values): pass",
    "exits when called": "def total(values):\n    raise SystemExit(0)",
    "prints a pass": "print('passed')\ndef total(values):\n    print('{\"problem\": \"\"}')",
    "replaces check": "def check(candidate): pass\ndef total(values): pass",
    "replaces the error": "import builtins\nbuiltins.AssertionError = type('E', (Exception,), {})\n"
    "builtins.compile = lambda *a, **k: None\ndef total(values): pass",
    "equals everything": "class Any:\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
    "def total(values):\n    return Any()",
    "number that equals everything": "class Any(int):\n    def __eq__(self, other): return True\n"
    "    def __repr__(self): return '2.0'\ndef total(values):\n    return Any(7)",
    "replaces a helper of the test": "def halve(n): return 7\ndef total(values):\n    return 7",
}
CASES = [(RIGHT, True), (WRONG, False), ({name: f"```python\n{code}\n```" for name, code in HOSTILE.items()}, False)]
GRADES = [pytest.param(answer, right, id=name) for answers, right in CASES for name, answer in answers.items()]


@pytest.mark.parametrize(("answer", "right"), GRADES)
def test_answers(answer: str, right: bool) -> None:
    task = HumanEval()
    assert task.grade(task.item("humaneval/0", ROW), answer) is right


def test_prompt_stays_in_front() -> None:
    code = "def total(v):\n    pass\n"
    assert assemble(PROMPT, "total", f"```python\n{code}```") == f"{PROMPT}\n{code}"
    assert assemble(PROMPT, "total", BODY) == WHOLE
    assert assemble(PROMPT.rstrip("\n"), "total", BODY) == WHOLE


@given(st.text(alphabet="`~ \ndeftotal(x):return python\0\ud800\"'", max_size=80) | st.text(max_size=40))
def test_any_answer_makes_a_program_behind_the_prompt(answer: str) -> None:
    assert assemble(PROMPT, "total", answer).startswith(PROMPT)
