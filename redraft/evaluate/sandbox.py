"""Run one untrusted Python function on given arguments in a short-lived, locked-down subprocess.

The expected values never enter the child: it reports what the function returned and the parent compares, so printing
"passed", exiting early or patching the checker gains nothing. The child is `python -I -S` in an empty directory with an
empty environment, limits on CPU time, memory, file size, open files and processes, and an audit hook that refuses every
audited action (opening files, sockets, processes, ctypes, imports, threads) once the code runs. This stops accidents
and ordinary hostile code; it is no substitute for a container where an attacker is expected.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Case = tuple[tuple[Any, ...], Any]  # (arguments, expected value), both plain literals

_HARNESS = r"""
import builtins, collections, functools, itertools, json, math, os, re, resource, string, sys

request = json.loads(sys.stdin.buffer.read())
for name, value in request["limits"].items():
    resource.setrlimit(getattr(resource, name), (value, value))
report = os.dup(1)
devnull = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(devnull, fd)
write, leave, dumps = os.write, os._exit, json.dumps
arguments = eval(request["arguments_source"])
source, function = request["source"], request["function"]
KEEP = {"builtins", "collections", "functools", "itertools", "math", "re", "string", "sys"}
for name in list(sys.modules):
    if name not in KEEP:
        del sys.modules[name]
for name in ("open", "input", "breakpoint"):
    delattr(builtins, name)

def refuse(event, args, allowed=frozenset({"exec", "compile"}), error=PermissionError):
    if event not in allowed:
        raise error(event)

values, problem = [], ""
try:
    sys.addaudithook(refuse)
    namespace = {"__name__": "answer"}
    exec(compile(source, "answer.py", "exec"), namespace)
    for args in arguments:
        values.append(repr(namespace[function](*args))[:4096])
except BaseException as e:
    problem = (type(e).__name__ + ": " + str(e))[:300]
write(report, dumps({"values": values, "problem": problem}).encode())
leave(0)
"""


@dataclass(frozen=True)
class SandboxLimits:
    """What the child may use. Seconds and bytes."""

    wall_seconds: float = 5.0
    cpu_seconds: int = 2
    memory_bytes: int = 512 * 2**20
    file_bytes: int = 2**20  # also caps the child's report


@dataclass(frozen=True)
class SandboxResult:
    """`passed` only when every case returned its expected value; `reason` says why not, in one line."""

    passed: bool
    reason: str
    seconds: float


def run_function(
    source: str, function: str, cases: Sequence[Case], limits: SandboxLimits | None = None
) -> SandboxResult:
    """Define `source` in a subprocess, call `function` on each case's arguments, compare the returned literals here.

    Returned values must be equal and of the same type (True is not 1). Nothing raised by the code reaches the caller.
    """
    if not cases:
        raise ValueError("no cases: nothing would be checked")
    limits = limits or SandboxLimits()
    started = time.monotonic()
    report, reason = _run_child(_request(source, function, cases, limits), limits.wall_seconds)
    if not reason:
        reason = _compare(report, cases)
    return SandboxResult(reason == "passed", reason, time.monotonic() - started)


def _request(source: str, function: str, cases: Sequence[Case], limits: SandboxLimits) -> bytes:
    rlimits = {
        "RLIMIT_CPU": limits.cpu_seconds,
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": 16,
        "RLIMIT_CORE": 0,
        "RLIMIT_NPROC": 1,
    }
    arguments = repr([args for args, _ in cases])
    request = {"source": source, "function": function, "arguments_source": arguments, "limits": rlimits}
    return json.dumps(request).encode()


def _run_child(request: bytes, wall_seconds: float) -> tuple[bytes, str]:
    """(the child's report, "") or (anything, the reason why there is none)."""
    with tempfile.TemporaryDirectory() as cwd, tempfile.TemporaryFile() as out:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", _HARNESS],
            stdin=subprocess.PIPE,
            stdout=out,  # a file, not a pipe: RLIMIT_FSIZE bounds it
            stderr=subprocess.DEVNULL,
            cwd=cwd,
            env={},
            start_new_session=True,
        )
        try:
            child.communicate(request, timeout=wall_seconds)
        except subprocess.TimeoutExpired:
            return b"", f"no answer within {wall_seconds:g} s"
        finally:
            _kill_group(child)
        if child.returncode:
            return b"", f"the process ended with status {child.returncode}"
        out.seek(0)
        return out.read(), ""


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """End the child and anything it left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _compare(report: bytes, cases: Sequence[Case]) -> str:
    """ "passed", or the first thing that is wrong."""
    try:
        decoded = json.loads(report)
        values, problem = decoded["values"], decoded["problem"]
    except (ValueError, KeyError, TypeError):
        return "the process ended without a result"
    if problem:
        return str(problem)
    if not isinstance(values, list) or len(values) != len(cases):
        return f"{len(values)} results for {len(cases)} cases"
    for (args, expected), text in zip(cases, values, strict=True):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return f"{args!r} returned no plain value: {str(text)[:80]}"
        if type(value) is not type(expected) or value != expected:
            return f"{args!r} returned {value!r}, expected {expected!r}"[:300]
    return "passed"
