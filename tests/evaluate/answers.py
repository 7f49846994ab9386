"""A task and records that tests of the harness share."""

from redraft.evaluate.base import Item
from redraft.evaluate.run import Record


class Echo:
    """Right when the engine repeats an even number and ends."""

    name = "echo"
    description = "repeat"

    def items(self, limit: int) -> list[Item]:
        return [Item(f"echo/{n}", str(n), f"You said: {n}") for n in range(limit)]

    def grade(self, item: Item, answer: str, ended: bool = True) -> bool:
        return ended and answer == item.expected and int(item.prompt) % 2 == 0


def record(**changes: object) -> Record:
    base = {
        "id": "t/0", "task": "t", "prompt": "p", "answer": "a", "expected": "a", "correct": True, "tokens": 10,
        "forwards": 4, "tokens_per_forward": 2.5, "steps_per_canvas": [4], "finish_reason": "stop", "seconds": 2.0,
        "answer_seconds": 3.0, "seed": 1,
    }  # fmt: skip
    return Record(**{**base, **changes})  # type: ignore[arg-type]
