"""GSM8K (Cobbe et al., arXiv 2110.14168): word problems whose answer is a number, asked zero-shot.

The number is taken where the answer states it: the last `\\boxed{...}`, else the last `####`, else the last
"answer is", else the last number of the text. It is compared as a number, so $1,200.00 equals 1200.
"""

import re
from fractions import Fraction

from redraft.evaluate.base import Benchmark, Item

INSTRUCTION = "Reason step by step, and put the final number in \\boxed{}."

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(rf"(?<![\w.])(?P<sign>-)?(?P<value>{_DIGITS}(?:\.\d+)?|\.\d+)(?:\s*/\s*(?P<below>\d+)(?![\d.]))?")
_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_STATED = re.compile(r"\banswer(?:\b[^\n.:=]{0,80}?\bis\b\s*:?|\s*[:=])", re.IGNORECASE)


class Gsm8k(Benchmark):
    """Right when the stated number equals the reference's: the text after the data set's mark `####`."""

    name = "gsm8k"
    description = "word problems of two to eight steps; the final number is graded"
    file, hub, config = "gsm8k_test.jsonl", "openai/gsm8k", "main"
    fields = ("question", "answer")

    def item(self, id: str, row: dict[str, str]) -> Item:
        return Item(id, f"{row['question'].strip()}\n\n{INSTRUCTION}", row["answer"].rpartition("####")[2].strip())

    def grade(self, item: Item, answer: str, ended: bool = True) -> bool:
        found = extract_number(answer)
        return found is not None and found == extract_number(item.expected)


def extract_number(answer: str) -> Fraction | None:
    """The number that `answer` gives as its result; None where there is none."""
    text = _plain(answer)
    phrases = list(_STATED.finditer(text))
    places = (
        last_boxed(text) or "",
        _line(text.rpartition("####")[2]) if "####" in text else "",
        _line(text[phrases[-1].end() :]) if phrases else "",
    )
    for stated in places:
        if (number := _first_number(stated)) is not None:
            return number
    numbers = list(_NUMBER.finditer(text))
    return _value(numbers[-1]) if numbers else None


def last_boxed(text: str) -> str | None:
    """What the last closed `\\boxed{...}` holds, braces matched; None where there is none."""
    opened: list[int | None] = []  # where the content of each open box starts; None for other braces
    boxes: list[tuple[int, int]] = []
    for mark in _BRACES.finditer(text):
        if mark[0] == "{":
            opened.append(None)
        elif mark["box"]:
            opened.append(mark.end())
        elif mark[0] == "}" and opened and (start := opened.pop()) is not None:
            boxes.append((start, mark.start()))
    start, end = max(boxes, default=(0, 0))
    return text[start:end] if boxes else None


def _line(text: str) -> str:
    """The first line that holds anything."""
    return text.strip().partition("\n")[0]


def _plain(text: str) -> str:
    """Numbers as digits: no dollar signs, LaTeX spacing, emphasis or minus signs of other alphabets."""
    text = text.replace("−", "-").replace("**", "").replace("{,}", ",").replace("\u202f", " ").replace("\u00a0", " ")
    text = re.sub(r"(?<=\d)(?:\\[,!:; ]|,\\!)(?=\d{3})", "", text)
    text = _FRACTION.sub(r"\1/\2", text)
    return re.sub(r"\\?[$€£]\s*", lambda m: "" if m.start() and text[m.start() - 1] == "-" else " ", text)


def _first_number(text: str) -> Fraction | None:
    """The first number after the last equals sign, so that "2 + 3 = 5 apples" is 5."""
    found = _NUMBER.search(text.rpartition("=")[2]) or _NUMBER.search(text)
    return _value(found) if found else None


def _value(match: re.Match[str]) -> Fraction | None:
    """None for digits without end, which Python refuses to read."""
    if len(match[0]) > 1000:
        return None
    value = Fraction(match["value"].replace(",", ""))
    below = int(match["below"] or 1)
    return (-value if match["sign"] else value) / (below or 1)
