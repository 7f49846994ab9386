"""HumanEval (Chen et al., arXiv 2107.03374): Python functions from their docstrings, asked zero-shot.

The answer's code is put after the prompt and runs in the sandbox against the problem's own tests. One answer per
problem, so the accuracy is pass@1.
"""

import ast
import re
import textwrap
import warnings
from contextlib import suppress

from redraft.evaluate.base import Benchmark, Item
from redraft.evaluate.sandbox import SandboxLimits, run_check

INSTRUCTION = "Complete this Python function. Answer with the whole function in one Python code block."
LIMITS = SandboxLimits(wall_seconds=20.0, cpu_seconds=10, memory_bytes=2**30)

# A block that was cut off has no closing fence.
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)[^\n`]*\n(.*?)(?:^[ \t]*(?:```|~~~)[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
# How code at the top level of a module starts.
_STATEMENT = re.compile(
    r"^(?:import\s+\w|from\s+[\w.]+\s+import\b|(?:async\s+)?def\s+\w+\s*\(|class\s+\w+\s*[(:]|@\w)", re.MULTILINE
)


class HumanEval(Benchmark):
    """Right when the problem's tests pass."""

    name = "humaneval"
    description = "Python functions from docstrings; unit tests in a sandbox decide"
    file, hub = "HumanEval.jsonl.gz", "openai/openai_humaneval"
    fields = ("task_id", "prompt", "entry_point", "canonical_solution", "test")

    def item(self, id: str, row: dict[str, str]) -> Item:
        prompt = f"{INSTRUCTION}\n\n```python\n{row['prompt'].rstrip()}\n```"
        return Item(id, prompt, row["canonical_solution"], row)

    def grade(self, item: Item, answer: str, ended: bool = True) -> bool:
        row = item.data
        source = assemble(row["prompt"], row["entry_point"], answer)
        return run_check(source, row["entry_point"], row["test"], context=row["prompt"], limits=LIMITS).passed


def assemble(prompt: str, function: str, answer: str) -> str:
    """The program that an answer makes of a prompt: whole functions follow it, the rest of a function completes it.

    Of several code blocks the last that defines `function` counts, else the first. Prose around code without a fence is
    left out. The prompt stays in front in any case: its imports and helpers belong to the program.
    """
    blocks = [m[1] for m in _FENCE.finditer(answer)]
    defines = re.compile(rf"^(?:async\s+)?def\s+{re.escape(function)}\s*\(", re.MULTILINE)
    blocks = [block if defines.search(block) else textwrap.dedent(block) for block in blocks]
    whole = [block for block in blocks if defines.search(block)]
    if whole:
        return f"{prompt}\n{whole[-1]}"
    code = blocks[0] if blocks else answer
    if defines.search(code):
        start = _STATEMENT.search(code)
        return _longest_valid(f"{prompt}\n", code[start.start() :] if start else code)
    body = code if re.match(r"\s*\n?[ \t]", code) else textwrap.indent(code, "    ")
    return _longest_valid(prompt if prompt.endswith("\n") else f"{prompt}\n", body.strip("\n"))


def _longest_valid(head: str, text: str) -> str:
    """`head` and as many lines of `text` as parse as Python; all of them where no cut helps."""
    lines = text.split("\n")
    for count in range(len(lines), 0, -1):
        program = head + "\n".join(lines[:count]) + "\n"
        with suppress(SyntaxError, ValueError, MemoryError, RecursionError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings
            ast.parse(program)
            return program
    return f"{head}{text}\n"
