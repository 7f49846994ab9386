"""`redraft tune kernels`: try every candidate of every kernel that has settings and write the GPU's table.

Each candidate passes the correctness gate of `redraft bench kernels` before it is timed. The default stays unless a
candidate is faster by more than the noise of a timing.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from redraft.bench.cases.case import Changes, KernelCase, Problem, Scale
from redraft.bench.kernels import check, copies, time_problems
from redraft.device import environment
from redraft.files import write_text
from redraft.kernels.tables import as_given

NOISE = 0.03  # of a time: what two timings of one setting may differ by


@dataclass(frozen=True)
class Trial:
    """One setting of one kernel. us is None where it was refused, for `reason`."""

    kernel: str
    changes: Changes
    us: float | None
    reason: str = ""


Timer = Callable[[KernelCase, Scale, torch.Generator, Problem, Changes], float]


def tune(cases: list[KernelCase], scale: Scale, seed: int = 0, timer: Timer | None = None) -> Iterator[Trial]:
    """Try the default and every candidate of every case that has some. timer: microseconds of a checked problem."""
    for case in cases:
        for changes in ({}, *case.candidates) if case.candidates else ():
            with as_given():
                trial = _try(case, scale, seed, changes, timer or _time)
            yield trial


def _try(case: KernelCase, scale: Scale, seed: int, changes: Changes, timer: Timer) -> Trial:
    generator = torch.Generator(scale.device).manual_seed(seed)
    try:
        problem = case.build(scale, generator, changes)
        gate = check(problem)
        if not gate.passed:
            return Trial(case.name, changes, None, gate.reason)
        return Trial(case.name, changes, timer(case, scale, generator, problem, changes))
    except Exception as e:  # too much shared memory, a tile the compiler rejects: reasons to refuse a setting
        return Trial(case.name, changes, None, f"{type(e).__name__}: {' '.join(str(e).split())[:200]}")


def _time(case: KernelCase, scale: Scale, generator: torch.Generator, problem: Problem, changes: Changes) -> float:
    return time_problems(copies(case, scale, generator, problem, changes), scale.device).median * 1e3


def best(trials: list[Trial]) -> dict[str, dict[str, Any]]:
    """Settings by kernel for a table: the fastest accepted trial of each, {} where the default is as fast."""
    chosen: dict[str, dict[str, Any]] = {}
    for kernel in dict.fromkeys(trial.kernel for trial in trials):
        accepted = [(t.us, t.changes) for t in trials if t.kernel == kernel and t.us is not None]
        if accepted:
            us, changes = min(accepted, key=lambda trial: trial[0])
            default = next((us for us, changes in accepted if not changes), float("inf"))
            chosen[kernel] = {} if default <= us * (1 + NOISE) else dict(changes)
    return chosen


def table(trials: list[Trial], gpu: str, device: torch.device) -> dict[str, Any]:
    """The content of a table: the winners, and every time they were chosen by."""
    measured = [
        {"kernel": t.kernel, "changes": dict(t.changes), "us": t.us, **({"refused": t.reason} if t.us is None else {})}
        for t in trials
    ]
    return {"gpu": gpu, "versions": environment(device), "settings": best(trials), "measured": measured}


def write_table(path: Path, content: dict[str, Any]) -> None:
    """Write a table whole or not at all."""
    write_text(path, json.dumps(content, indent=1) + "\n")
