"""The sandbox passes right answers and nothing else, whatever the code tries."""

import ctypes
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from redraft.evaluate.sandbox import DEFAULT_LIMITS, SandboxLimits, SandboxResult, run_check, run_function

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="resource limits as on Linux")

Run = Callable[..., SandboxResult]
DOUBLE = [((1,), 2), ((21,), 42)]
TEST = "def check(candidate):\n    assert candidate(1) == 2, 'one'\n    assert candidate(21) == 42\n"
HALF_RIGHT = "def f(x):\n    return 2\n"
# The dictionary of `os`, without an import.
OS = "os = [c for c in object.__subclasses__() if c.__name__ == '_wrap_close'][0].__init__.__globals__\n"
WRITE = """
for fd in range(64):
    try:
        os['write'](fd, b'{text}\\n' * 3)
    except OSError:
        pass
"""


of_cases = partial(run_function, function="f", cases=DOUBLE)
of_test = partial(run_check, function="f", test=TEST)


def double(body: str = "pass", limits: SandboxLimits = DEFAULT_LIMITS) -> SandboxResult:
    """The verdict on a right function that first runs `body`, one line."""
    return of_cases(f"def f(x):\n    {body}\n    return x * 2", limits=limits)


def attack(body: str = "pass", limits: SandboxLimits = DEFAULT_LIMITS) -> SandboxResult:
    """The same by a test in a process of its own; `body` has `os` at hand."""
    return of_test(f"{OS}def f(x):\n    {body}\n    return x * 2", limits=limits)


@pytest.mark.parametrize("run", [double, attack, partial(of_test, "def f(x):\n    return x * 2")])
def test_right_answers_pass(run: Run) -> None:
    result = run()
    assert (result.passed, result.reason) == (True, "passed")
    assert 0 < result.seconds < 5


WRONG_ANSWERS = [
    ("def f(x):\n    return x + 1", "(21,) returned 22, expected 42"),
    ("def f(x):\n    return float(x * 2)", "returned 2.0, expected 2"),
    ("def f(x):\n    return object()", "no plain value"), ("def f(x) return x", "SyntaxError"),
    ("def g(x):\n    return x * 2", "KeyError"), ("def f(x):\n    raise ValueError('no')", "ValueError: no"),
    ("import sys\nsys.exit(0)", "SystemExit"), ("def f(x):\n    raise SystemExit(0)", "SystemExit"),
]  # fmt: skip
WRONG_FUNCTIONS = [
    (HALF_RIGHT, "AssertionError"), ("def f(x):\n    return x", "AssertionError: one"),
    ("def f(x) return x", "SyntaxError"), ("def g(x):\n    return x * 2", "KeyError: 'f'"),
    ("def f(x):\n    raise ValueError('no')", "ValueError: no"),
    ("def f(x):\n    return object()", "no plain value: object"),
    ("def f(x):\n    yield x * 2", "no plain value: generator"),
    ("def f(x):\n    return [x] * 10**6", "the value is too long"),
    ("def f(x):\n    y = []\n    for _ in range(10**5): y = [y]\n    return y", "RecursionError"),
    ("def f(x):\n    return f(x)", "RecursionError"),
    ("import numpy\ndef f(x):\n    return x * 2", "ImportError: numpy is not available here"),
]  # fmt: skip


FORBIDDEN = [
    "open('/etc/passwd').read()", "__import__('io').open('/etc/passwd').read()", "__import__('os').system('true')",
    "__import__('os').fork()", "__import__('posix').fork()", "__import__('subprocess').run(['true'])",
    "__import__('socket').create_connection(('127.0.0.1', 9))", "__import__('ctypes').CDLL(None)",
    "__import__('_thread').start_new_thread(print, ())", "__import__('_io').open('/etc/passwd').read()",
]  # fmt: skip
FORBIDDEN_WITH_OS = [
    "open('/etc/passwd')", "os['open']('/etc/passwd', 0)", "os['listdir']('/')", "os['system']('true')",
    "os['fork']()", "os['execv']('/bin/true', ['true'])", "os['posix_spawn']('/bin/true', ['true'], {})",
    "os['kill'](os['getppid'](), 9)", "os['pipe']()", "os['dup'](1)", "__import__('socket').socket()",
    "__import__('ctypes')", "__import__('threading')", "__import__('signal')", "__import__('sys').modules['os']",
]  # fmt: skip
MEMORY_BOMBS = ["x = [0] * 10**10", "x = [bytearray(10**7) for _ in range(10**5)]"]


@pytest.mark.parametrize(
    ("run", "source", "reason"),
    [
        *((of_cases, *each) for each in WRONG_ANSWERS), *((of_test, *each) for each in WRONG_FUNCTIONS),
        *((double, body, "Error") for body in FORBIDDEN), *((attack, body, "Error") for body in FORBIDDEN_WITH_OS),
        (double, "return len('a' * 10**10)", "MemoryError"), *((attack, body, "MemoryError") for body in MEMORY_BOMBS),
    ],
)  # fmt: skip
def test_what_is_wrong_or_forbidden_fails_with_a_reason(run: Run, source: str, reason: str) -> None:
    result = run(source)
    assert not result.passed and reason in result.reason


def test_no_cases_is_an_error() -> None:
    with pytest.raises(ValueError, match="no cases"):
        run_function("def f(): pass", "f", [])


LOOP = "while True: pass"
ENDLESS = (LOOP, "__import__('time').sleep(60)", "10 ** 10 ** 10", "[print('x' * 1000) for _ in iter(int, 1)]")


@pytest.mark.parametrize(("run", "body"), [(double, LOOP), *((attack, body) for body in ENDLESS)])
def test_endless_functions_are_stopped(run: Run, body: str) -> None:
    started = time.monotonic()
    assert not run(body, SandboxLimits(wall_seconds=1.0)).passed
    assert time.monotonic() - started < 4


def test_cpu_limit_is_enforced() -> None:
    result = double(LOOP, SandboxLimits(wall_seconds=20, cpu_seconds=1))
    assert not result.passed and "status" in result.reason


FAKED_ANSWERS = [
    'print(\'{"values": ["2", "42"], "problem": ""}\')', "import os\nos._exit(0)", "import posix\nposix._exit(0)",
    "print('passed')\ndef f(x):\n    print('passed')\n    return 0",
    "class A(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x):\n    return A(0)",
    "class A:\n    def __repr__(self): return 'A'\ndef f(x):\n    return A()",
]  # fmt: skip
FAKED_FUNCTIONS = {
    "prints": f'print(\'{{"problem": ""}}\')\n{HALF_RIGHT}',
    "exits": f"import sys\nsys.exit(0)\n{HALF_RIGHT}",
    "exits at once": f"{OS}os['_exit'](0)\n{HALF_RIGHT}",
    "writes a verdict": OS + WRITE.format(text='{"problem": ""}') + HALF_RIGHT,
    "writes values": OS + WRITE.format(text='{"value": "2"}') + HALF_RIGHT,
    "writes rubbish": OS + WRITE.format(text="(" * 10**5) + HALF_RIGHT,
    "patches builtins": "import builtins\nbuiltins.AssertionError = ValueError\n"
    f"builtins.repr = lambda v: '2'\n{HALF_RIGHT}",
    "equal int": "class A(int):\n    def __eq__(self, other): return True\ndef f(x):\n    return A(2)",
    "false class": "class A:\n    __class__ = int\n    def __repr__(self): return '2'\ndef f(x):\n    return A()",
    "hostile error": "class E(BaseException):\n    def __str__(self): raise SystemExit(0)\ndef f(x):\n    raise E",
    "patches the harness": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        frame.f_globals.update(refuse=None, reply=print, literal=lambda v: '2')\n"
    "        frame = frame.f_back\n    return 2",
    "defines check": "def check(candidate): pass\ndef f(x): pass",
}


@pytest.mark.parametrize(
    ("run", "source"),
    [
        *((of_cases, source) for source in FAKED_ANSWERS),
        *(pytest.param(of_test, source, id=name) for name, source in FAKED_FUNCTIONS.items()),
        pytest.param(double, "return 'a' * 50_000_000", id="huge output"),
    ],
)
def test_a_pass_cannot_be_faked(run: Run, source: str) -> None:
    assert not run(source).passed


@pytest.mark.parametrize(
    "expression",
    ["None", "True", "-7", "2.5", "float('inf')", "'a\\n\\'b'", "b'x'", "1j", "()", "(1,)", "[[1], (2, 3)]",
     "{'a': {1, 2}}", "set()", "frozenset({3})", "10**50"],
)  # fmt: skip
def test_values_cross_unchanged_both_ways(expression: str) -> None:
    test = f"def check(f):\n    assert f({expression}) == {expression}\n    assert f(x={expression}) == {expression}\n"
    assert run_check("def f(x):\n    return x", "f", test).reason == "passed"


def test_subclasses_count_as_what_they_extend() -> None:
    source = "from collections import *\nP = namedtuple('P', 'a b')\ndef f():\n    return Counter('aab'), P(1, 2)"
    assert run_check(source, "f", "def check(f):\n    assert f() == ({'a': 2, 'b': 1}, (1, 2))").reason == "passed"


def test_the_context_is_the_tests_own() -> None:
    test = "def check(f):\n    assert g(3) == double(3)\n    assert g(3) == 6\n"
    context = "def double(x): return 2 * x\ndef g(x): raise NotImplementedError\n"
    assert run_check("def g(x):\n    return 2 * x", "g", test, context).passed
    assert not run_check("def double(x): return 7\ndef g(x): return 7\n", "g", test, context).passed


def test_the_callers_environment_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFT_SECRET", "s3cret")
    assert attack("assert not [k for k in os['environ'] if 'SECRET' in k]").passed


def test_the_callers_files_stay(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("text")
    mode = kept.stat().st_mode
    path, new = repr(str(kept)), repr(str(tmp_path / "new"))
    kind = "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'FileIO'][0]"
    for body in (f"open({new}, 'w').write('x')", f"{kind}({new}, 'w')"):
        assert not double(body).passed
    for call in (
        f"remove']({path})", f"truncate']({path}, 0)", f"rename']({path}, {new})", f"chmod']({path}, 0)",
        f"mkdir']({new})", f"symlink']({path}, {new})",
    ):  # fmt: skip
        assert not attack(f"os['{call}").passed
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    assert (kept.read_text(), kept.stat().st_mode) == ("text", mode)


def test_the_kernel_refuses_what_python_does_not_audit(tmp_path: Path) -> None:
    if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) < 1:
        pytest.skip("this kernel has no Landlock")
    fifo = tmp_path / "fifo"
    assert "PermissionError: [Errno 13]" in attack(f"os['mkfifo']({str(fifo)!r})").reason
    assert not fifo.exists()


def test_nothing_is_left_running() -> None:
    before = children()
    attack(LOOP, SandboxLimits(wall_seconds=0.5))
    of_test(HALF_RIGHT)
    assert children() == before


def children() -> set[str]:
    """Processes whose parent is this one."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if f"\nPPid:\t{os.getpid()}\n" in status.read_text():
                found.add(status.parent.name)
        except OSError:  # it has just ended
            continue
    return found
