"""Run untrusted Python functions in short-lived, locked-down subprocesses.

The process that runs untrusted code never decides whether it is right: it receives arguments and sends back returned
values as literals. `run_function` compares them here. `run_check` runs a benchmark's own test in a second process,
which calls the function through a proxy and gives the verdict. So printing "passed", leaving early, overriding `__eq__`
or patching asserts, builtins and the harness gains nothing; expected values are never where the code could read them.

Each child is `python -I -S` in an empty directory with an empty environment. The kernel limits its CPU time, memory,
file size and processes, gives it no new file descriptors (so neither files nor sockets) and, where it has Landlock,
lets it change nothing in any file system, connect nowhere and signal nobody. Inside Python an audit hook refuses every
audited action (opening and deleting files, sockets, processes, signals, ctypes, imports) once the code runs. This stops
accidents and ordinary hostile code; it is no substitute for a container where an attacker is expected.
"""

import ast
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import IO, Any

Case = tuple[tuple[Any, ...], Any]  # (arguments, expected value), both plain literals

BASIC_MODULES = ("builtins", "collections", "functools", "itertools", "math", "re", "string", "sys")
# What solutions of programming benchmarks use. Imported beforehand: afterwards nothing can be.
LIBRARY_MODULES = (
    *BASIC_MODULES, "__future__", "abc", "array", "bisect", "calendar", "cmath", "collections.abc", "contextlib",
    "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "hashlib", "heapq", "json", "numbers",
    "operator", "queue", "random", "statistics", "textwrap", "time", "types", "typing", "unicodedata",
)  # fmt: skip

# Starts the program in its first argument under Landlock (landlock(7)), where the kernel has that.
# Reading stays allowed, since the interpreter has yet to start; the limit on descriptors takes it away later.
_LAUNCHER = r"""
import ctypes, os, struct, sys

CREATE, RESTRICT, VERSION, NO_NEW_PRIVILEGES = 444, 446, 1, 38
WRITE = 1 << 1 | sum(1 << bit for bit in range(4, 13))  # write, remove and make entries of any kind
if sys.platform == "linux":
    libc = ctypes.CDLL(None)
    abi = libc.syscall(CREATE, None, ctypes.c_size_t(0), VERSION)
    if abi >= 1:
        files = WRITE | (1 << 13 if abi >= 2 else 0) | (1 << 14 if abi >= 3 else 0)  # rename across, truncate
        fields = [files, *([0b11] if abi >= 4 else []), *([0b11] if abi >= 6 else [])]  # TCP; sockets and signals
        rules = struct.pack(f"{len(fields)}Q", *fields)
        ruleset = libc.syscall(CREATE, rules, ctypes.c_size_t(len(rules)), 0)
        libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        if ruleset < 0 or libc.syscall(RESTRICT, ruleset, 0):
            sys.exit("Landlock is there but cannot be used")
        os.close(ruleset)
os.execve(sys.executable, [sys.executable, "-I", "-S", "-B", "-c", sys.argv[1]], {})
"""

_COMMON = r"""
import ast, builtins, importlib, json, os, resource, sys

LINE = 2**20  # most bytes of one call or one value
ALLOWED = frozenset({
    "exec", "compile", "builtins.id", "sys._getframe", "sys._getframemodulename", "sys.unraisablehook", "time.sleep",
    "object.__getattr__", "object.__setattr__", "object.__delattr__", "array.__new__",
})
incoming = os.fdopen(os.dup(0), "rb")
report = os.dup(1)
request = json.loads(incoming.readline())

def literal(value):
    # The value's text in plain types: a subclass counts as what it extends, and its own methods are not asked.
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, float):
        text = float.__repr__(value)
        return {"inf": "1e999", "-inf": "-1e999"}.get(text, text)
    for kind in (int, str, bytes, complex):
        if isinstance(value, kind):
            return kind.__repr__(value)
    if isinstance(value, dict):
        return "{" + ", ".join(literal(k) + ": " + literal(v) for k, v in dict.items(value)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, list.__iter__(value))) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(literal(v) + ", " for v in tuple.__iter__(value)) + ")"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(map(literal, value)) + "}" if value else "set()"
    raise TypeError("no plain value: " + type(value).__name__)

def explain(error):
    return (type(error).__name__ + ": " + str(error))[:300]

def refuse(event, args, allowed=ALLOWED, permission=PermissionError, missing=ImportError):
    if event == "import":
        raise missing(args[0] + " is not available here")
    if event not in allowed:
        raise permission(event)

def lock_down():
    for name in request["modules"]:
        importlib.import_module(name)
    for fd in (0, 1):
        os.dup2(2, fd)  # /dev/null
    keep = {*request["modules"], "_strptime"}
    for name in list(sys.modules):
        if name not in keep:
            del sys.modules[name]
    for name in ("open", "input", "breakpoint"):
        delattr(builtins, name)
    for name, value in request["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    sys.addaudithook(refuse)
"""

# A line per call comes in, (arguments, keyword arguments) as a literal; a line goes out, its value or its problem.
_CANDIDATE = r"""
def reply(write=os.write, dumps=json.dumps, out=report, **fields):
    write(out, dumps(fields).encode() + b"\n")

def answer(function, line):
    args, kwargs = evaluate(line)
    text = literal(function(*args, **kwargs))
    if len(text) > LINE:
        raise ValueError("the value is too long")
    return text

evaluate, leave, module = eval, os._exit, type(sys)("answer")
lock_down()
sys.modules["answer"] = module
try:
    exec(compile(request["source"], "answer.py", "exec"), module.__dict__)
    function = module.__dict__[request["function"]]
    while line := incoming.readline():
        reply(value=answer(function, json.loads(line)))
except BaseException as e:
    reply(problem=explain(e))
leave(0)
"""

# Trusted code only: the test, and the context that it needs, such as helpers in the problem's text.
_TESTER = r"""
calls, values = os.fdopen(request["calls"], "wb"), os.fdopen(request["values"], "rb")

def send(line):
    calls.write(line.encode() + b"\n")
    calls.flush()

def candidate(*args, **kwargs):
    send(json.dumps(literal((args, kwargs))))
    line = values.readline(2 * LINE)
    if not line.endswith(b"\n"):
        raise RuntimeError("the process ended without a result")
    answer = json.loads(line)
    if "problem" in answer:
        raise RuntimeError(answer["problem"])
    return ast.literal_eval(answer["value"])

write, leave, dumps, problem = os.write, os._exit, json.dumps, ""
lock_down()
try:
    send(request["candidate"])
    namespace = {"__name__": "test"}
    exec(compile(request["context"], "context.py", "exec"), namespace)
    namespace[request["function"]] = candidate
    exec(compile(request["test"], "test.py", "exec"), namespace)
    namespace["check"](candidate)
except BaseException as e:
    problem = explain(e)
write(report, dumps({"problem": problem}).encode())
leave(0)
"""


@dataclass(frozen=True)
class SandboxLimits:
    """What a child may use. Seconds and bytes."""

    wall_seconds: float = 5.0
    cpu_seconds: int = 2
    memory_bytes: int = 512 * 2**20
    file_bytes: int = 2**20  # also caps the child's report

    def resource_limits(self) -> dict[str, int]:
        """Limits by their names in the module `resource`."""
        return {
            "RLIMIT_CPU": self.cpu_seconds, "RLIMIT_AS": self.memory_bytes, "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": 0,  # those that are open stay open
            "RLIMIT_CORE": 0, "RLIMIT_NPROC": 1,
        }  # fmt: skip


DEFAULT_LIMITS = SandboxLimits()


@dataclass(frozen=True)
class SandboxResult:
    """`passed` only when every case returned its expected value; `reason` says why not, in one line."""

    passed: bool
    reason: str
    seconds: float


def run_function(
    source: str, function: str, cases: Sequence[Case], limits: SandboxLimits = DEFAULT_LIMITS
) -> SandboxResult:
    """Define `source` in a subprocess, call `function` on each case's arguments, compare the returned literals here.

    Returned values must be equal and of the same type (True is not 1). Nothing raised by the code reaches the caller.
    """
    if not cases:
        raise ValueError("no cases: nothing would be checked")
    calls = [json.dumps(repr((args, {}))) for args, _ in cases]
    lines = "\n".join([_request(function, BASIC_MODULES, limits, source=source), *calls, ""])
    return _run(_CANDIDATE, lines, limits, partial(_compare, cases))


def run_check(
    source: str, function: str, test: str, context: str = "", limits: SandboxLimits = DEFAULT_LIMITS
) -> SandboxResult:
    """Define the untrusted `source` in one subprocess and run `check(function)` of the trusted `test` in another.

    context: trusted definitions that the test may use. Arguments and values cross as literals: None, bool, numbers,
    str, bytes, and lists, tuples, dicts and sets of them; a function that returns anything else fails. An argument that
    the function changes in place does not change for the test. Nothing raised by the code reaches the caller.
    """
    with _child(_CANDIDATE, PIPE) as candidate:
        assert candidate.stdin and candidate.stdout, "both are pipes"
        calls, values = candidate.stdin.fileno(), candidate.stdout.fileno()
        request = _request(
            function, LIBRARY_MODULES, limits, calls=calls, values=values, context=context, test=test,
            candidate=_request(function, LIBRARY_MODULES, limits, source=source),
        )  # fmt: skip
        return _run(_TESTER, f"{request}\n", limits, _verdict, (calls, values))


def _request(function: str, modules: Sequence[str], limits: SandboxLimits, **more: Any) -> str:
    """The first line that a child reads."""
    return json.dumps({"function": function, "modules": modules, "limits": limits.resource_limits(), **more})


def _run(
    program: str, lines: str, limits: SandboxLimits, judge: Callable[[bytes], str], pass_fds: tuple[int, ...] = ()
) -> SandboxResult:
    """Send `lines` to a child and wait. judge: what its report comes to, "passed" or what is wrong."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as out, _child(program, out, pass_fds) as child:
        try:
            child.communicate(lines.encode(), timeout=limits.wall_seconds)
            out.seek(0)
            reason = f"the process ended with status {child.returncode}" if child.returncode else judge(out.read())
        except TimeoutExpired:
            reason = f"no answer within {limits.wall_seconds:g} s"
    return SandboxResult(reason == "passed", reason, time.monotonic() - started)


@contextmanager
def _child(program: str, stdout: int | IO[bytes], pass_fds: tuple[int, ...] = ()) -> Iterator[Popen[bytes]]:
    """A running child in an empty directory; at the end it is killed with everything it left behind."""
    command = [sys.executable, "-I", "-S", "-B", "-c", _LAUNCHER, _COMMON + program]
    alone: dict[str, Any] = {"env": {}, "start_new_session": True, "pass_fds": pass_fds}
    with (
        tempfile.TemporaryDirectory() as cwd,
        Popen(command, stdin=PIPE, stdout=stdout, stderr=DEVNULL, cwd=cwd, **alone) as child,
    ):
        try:
            yield child
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def _verdict(report: bytes) -> str:
    try:
        return str(json.loads(report)["problem"]) or "passed"
    except (ValueError, KeyError, TypeError):
        return "the test ended without a verdict"


def _compare(cases: Sequence[Case], report: bytes) -> str:
    """ "passed", or the first thing that is wrong."""
    lines = report.splitlines()
    for index, (args, expected) in enumerate(cases):
        try:
            reply = json.loads(lines[index])
            if "problem" in reply:
                return str(reply["problem"])
            value = ast.literal_eval(reply["value"])
        except (ValueError, SyntaxError, TypeError, KeyError, IndexError, MemoryError, RecursionError):
            return f"{args!r}: the process ended without a result"
        if type(value) is not type(expected) or value != expected:
            return f"{args!r} returned {value!r}, expected {expected!r}"[:300]
    return "passed" if len(lines) == len(cases) else f"{len(lines)} results for {len(cases)} cases"
