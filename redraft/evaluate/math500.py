"""MATH-500 (Hendrycks et al., arXiv 2103.03874; the 500 problems of Lightman et al., arXiv 2305.20050), zero-shot.

Answers are compared by math-verify: equal values count, however they are written. It runs in a process of its own,
which is killed when an answer such as 9^{9^{9^9}} keeps it busy.
"""

import importlib.util
import json
import select
import sys
import weakref
from contextlib import suppress
from subprocess import DEVNULL, PIPE, Popen

from redraft.errors import RedraftError, UsageError
from redraft.evaluate.base import Benchmark, Item
from redraft.evaluate.gsm8k import last_boxed

INSTRUCTION = "Reason step by step, and put the final answer in \\boxed{}."
START_SECONDS = 120.0  # imports sympy
ANSWER_SECONDS = 20.0

# A line [reference, answer] comes in; true or false goes out. Memory: 2 GiB.
_WORKER = r"""
import json, resource, sys
from math_verify import parse, verify
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
print("ready", flush=True)
for line in sys.stdin:
    reference, answer = json.loads(line)
    try:
        right = bool(verify(parse("\\boxed{" + reference + "}"), parse(answer)))
    except Exception:
        right = False
    print(json.dumps(right), flush=True)
"""


class Math500(Benchmark):
    """Right when math-verify finds the boxed answer equal to the reference."""

    name = "math500"
    description = "competition mathematics; the final expression is compared by value"
    file, hub = "math500_test.jsonl", "HuggingFaceH4/MATH-500"
    fields = ("problem", "answer")

    def items(self, limit: int) -> list[Item]:
        if importlib.util.find_spec("math_verify") is None:
            raise UsageError("task math500 needs the library math-verify; run pip install 'redraft[eval]'")
        return super().items(limit)

    def item(self, id: str, row: dict[str, str]) -> Item:
        return Item(id, f"{row['problem'].strip()}\n\n{INSTRUCTION}", row["answer"])

    def grade(self, item: Item, answer: str, ended: bool = True) -> bool:
        return VERIFIER.equal(item.expected, answer)


class Verifier:
    """math-verify in a process that is started when needed and again after an answer that it did not survive."""

    def __init__(self, seconds: float = ANSWER_SECONDS) -> None:
        self.seconds = seconds
        self._process: Popen[str] | None = None

    def equal(self, reference: str, answer: str) -> bool:
        """Whether the result that `answer` states equals `reference`. The last box decides where there is one.

        Raises RedraftError when math-verify does not start.
        """
        box = last_boxed(answer)
        stated = answer if box is None else f"\\boxed{{{box}}}"
        process = self._process = self._process or self._start()
        with suppress(BrokenPipeError):
            print(json.dumps([reference, stated]), file=process.stdin, flush=True)
        reply = _read_line(process, self.seconds)
        if not reply:
            _stop(process)
            self._process = None
        return reply == "true"

    def _start(self) -> Popen[str]:
        command = [sys.executable, "-I", "-B", "-c", _WORKER]
        process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env={}, text=True)
        weakref.finalize(self, _stop, process)
        if _read_line(process, START_SECONDS) != "ready":
            _stop(process)
            raise RedraftError("math-verify does not start; check it with python -c 'import math_verify'")
        return process


VERIFIER = Verifier()


def _read_line(process: Popen[str], seconds: float) -> str:
    """The next line, "" when none comes in time or the process has ended."""
    assert process.stdout is not None, "it is a pipe"
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline().strip() if ready else ""


def _stop(process: Popen[str]) -> None:
    process.kill()
    process.communicate()
