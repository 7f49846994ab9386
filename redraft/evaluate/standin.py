"""Questions for random weights, which understand none: letters as long as a benchmark's mean prompt."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from redraft.evaluate.tasks import Item

# Mean characters of the public prompts with their instruction, over 4 characters a token; here a letter is a token.
LENGTHS = {"gsm8k": 75, "humaneval": 138, "math500": 64}


class StandIn:
    """Takes a benchmark's place where its files are not given. No answer to it is right."""

    description = "random letters as long as the benchmark's mean prompt"

    def __init__(self, name: str) -> None:
        self.name = name

    def items(self, limit: int) -> Sequence[Item]:
        draw = random.Random(self.name)
        texts = ("".join(draw.choices(string.ascii_lowercase, k=LENGTHS[self.name])) for _ in range(limit))
        return [Item(f"{self.name}/{i}", text, "") for i, text in enumerate(texts)]

    def grade(self, item: Item, answer: str, ended: bool = True) -> bool:
        return False
