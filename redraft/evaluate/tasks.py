"""Tasks by name: benchmarks, the demo tasks, and stand-ins for models that understand none of them."""

import random
from importlib import import_module
from pathlib import Path
from string import ascii_lowercase

from redraft.errors import UsageError
from redraft.evaluate.base import Item, Task

# The module of each benchmark and its class, made of the directory with its files; imported when it is asked for.
BENCHMARKS = {"gsm8k": "Gsm8k", "humaneval": "HumanEval", "math500": "Math500", "everyday": "Everyday"}
# Mean characters of the public prompts with their instruction, over 4 characters a token; here a letter is a token.
STAND_IN_LENGTHS = {"gsm8k": 75, "humaneval": 138, "math500": 64}


def select_tasks(spec: str, data: Path | None = None, stand_in: bool = False) -> dict[str, Task]:
    """The tasks that a name, `demo:<name>` or `demo:all` stands for, by name.

    data: the directory that benchmark files are read from; without it they come from the hub, or with `stand_in` are
    replaced where they can be. Raises UsageError listing the names there are.
    """
    from redraft.evaluate.demo import TASKS as DEMO

    suite, _, name = spec.partition(":")
    if suite == "demo" and name in (*DEMO, "all"):
        return {n: DEMO[n] for n in (DEMO if name == "all" else (name,))}
    if stand_in and data is None and spec in STAND_IN_LENGTHS:
        return {spec: StandIn(spec)}
    if spec in BENCHMARKS:
        return {spec: getattr(import_module(f"redraft.evaluate.{spec}"), BENCHMARKS[spec])(data)}
    known = (*BENCHMARKS, *(f"demo:{n}" for n in (*DEMO, "all")))
    raise UsageError(f"task is {spec!r}, expected one of {', '.join(known)}")


class StandIn:
    """A benchmark's place for random weights: letters as long as its mean prompt. No answer to it is right."""

    description = "random letters as long as the benchmark's mean prompt"

    def __init__(self, name: str) -> None:
        self.name = name

    def items(self, limit: int) -> list[Item]:
        draw, length = random.Random(self.name), STAND_IN_LENGTHS[self.name]
        return [Item(f"{self.name}/{i}", "".join(draw.choices(ascii_lowercase, k=length)), "") for i in range(limit)]

    def grade(self, item: Item, answer: str, ended: bool = True) -> bool:
        return False
