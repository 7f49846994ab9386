"""The bundled model's tasks: held-out items that ship beside its checkpoint, and a grader for each.

`redraft/demo/heldout.jsonl` holds what `recipes.demo.heldout` drew from the generators: prompts that training never
saw. A line is {"task", "prompt", "answer"}, for a story also "words", the four it must use.
"""

import json
import random
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from redraft.errors import UsageError
from redraft.evaluate.base import Item
from redraft.evaluate.sandbox import Case, run_function

FILE = Path(__file__).parents[1] / "demo" / "heldout.jsonl"


def same_text(item: Item, answer: str) -> bool:
    """Equal to the reference but for outer white space."""
    return answer.strip() == item.expected


def final_number(item: Item, answer: str) -> bool:
    """The last sentence states the right number; the working before it may differ."""
    found, wanted = (re.search(r"The answer is (-?\d+)\.$", text) for text in (answer.strip(), item.expected))
    return bool(found and wanted and found[1] == wanted[1])


def story_form(item: Item, answer: str) -> bool:
    """The requested words occur, the length is a story's, every sentence is complete and closed by known punctuation.

    Whether the story is good is for a reader to say.
    """
    text = answer.strip()
    sentences = re.findall(r"[^.!?]+[.!?]", text)
    return (
        set(item.data) <= set(re.findall(r"[A-Za-z]+", text))
        and 60 <= len(text.split()) <= 150
        and "".join(sentences) in (text, text.removesuffix('"'))
        and all(re.match(r'["\s]*[A-Z]', s) for s in sentences)
    )


def unit_tests(item: Item, answer: str) -> bool:
    """The function returns, in a sandbox, what the reference returns for arguments that tell neighbours apart."""
    asked = re.fullmatch(r"Write a Python function (\w+) that takes a (.+?) and returns (.+)\.", item.prompt)
    assert asked is not None, item.prompt
    function, signature, what = asked.groups()
    namespace: dict[str, Any] = {}
    exec(item.expected, namespace)  # the reference is our own text from the file above
    cases: list[Case] = []
    for args in _arguments(signature, random.Random(repr((signature, what)))):
        with suppress(ValueError):  # the largest of nothing is not asked for
            cases.append((args, namespace[function](*args)))
    return run_function(answer, function, cases).passed


def _arguments(signature: str, r: random.Random) -> list[tuple[Any, ...]]:
    """Argument tuples that tell neighbouring constants apart, for a function of this signature."""
    if signature == "list xs":  # ranges that end or begin at every possible threshold, and unordered lists
        ends = [(list(range(-5, t)),) for t in range(36)] + [(list(range(t, 60)),) for t in range(36)]
        return ends + [(r.sample(range(-5, 60), 15),) for _ in range(6)]
    if signature == "string s":
        return [("".join(r.sample("aBcDeFgHiJkLmNoPqRsT", n)),) for n in (10, 11, 12, 14, 17, 20)]
    if signature == "number a and a number b":
        a = r.randint(2, 9)
        return [(r.randint(-9, 40), r.randint(-9, 40)) for _ in range(3)] + [(a, k * a) for k in range(2, 10)]
    if signature == "number n":
        return [(n,) for n in (9, 12, 17, 20, 33, 40)]
    return [(x,) for x in range(53)]


class DemoTask:
    """Held-out items of one demo task."""

    def __init__(self, name: str, description: str, grader: Callable[[Item, str], bool] = same_text) -> None:
        self.name, self.description, self.grader = name, description, grader

    @cached_property
    def held_out(self) -> list[Item]:
        rows = [row for row in map(json.loads, FILE.read_text("utf-8").splitlines()) if row["task"] == self.name]
        return [Item(f"{self.name}/{i}", row["prompt"], row["answer"], row.get("words")) for i, row in enumerate(rows)]

    def items(self, limit: int) -> list[Item]:
        """The first `limit`. Raises UsageError when there are fewer."""
        if limit > len(self.held_out):
            raise UsageError(f"task {self.name} has only {len(self.held_out)} held-out prompts, {limit} asked for")
        return self.held_out[:limit]

    def grade(self, item: Item, answer: str, ended: bool = True) -> bool:
        return self.grader(item, answer)


_ALL = (
    DemoTask("arithmetic", "word problems of two or three steps with worked answers", final_number),
    DemoTask("edit", "change a given text as told: replace, rename, delete, insert, swap, append"),
    DemoTask("lists", "sort, reverse, pick, count, join, deduplicate lists of numbers, words and letters"),
    DemoTask("facts", "51 plain facts in many phrasings"),
    DemoTask("stories", "short stories of about 100 tokens with requested characters", story_form),
    DemoTask("code", "tiny Python functions on numbers, lists and strings, checked by unit tests", unit_tests),
)
TASKS = {task.name: task for task in _ALL}
