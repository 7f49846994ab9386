"""The sandbox passes right answers and nothing else, whatever the code tries."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from redraft.evaluate.sandbox import SandboxLimits, run_function

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="resource limits as on Linux")

DOUBLE = [((1,), 2), ((21,), 42)]


def test_right_answer_passes() -> None:
    result = run_function("def f(x):\n    return x * 2", "f", DOUBLE)
    assert result.passed
    assert result.reason == "passed"
    assert 0 < result.seconds < 5


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def f(x):\n    return x + 1", "(21,) returned 22, expected 42"),
        ("def f(x):\n    return float(x * 2)", "returned 2.0, expected 2"),
        ("def f(x):\n    return object()", "no plain value"),
        ("def f(x) return x", "SyntaxError"),
        ("def g(x):\n    return x * 2", "KeyError"),
        ("def f(x):\n    raise ValueError('no')", "ValueError: no"),
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("def f(x):\n    raise SystemExit(0)", "SystemExit"),
    ],
)
def test_wrong_answers_fail_with_a_reason(source: str, reason: str) -> None:
    result = run_function(source, "f", DOUBLE)
    assert not result.passed
    assert reason in result.reason


def test_no_cases_is_an_error() -> None:
    with pytest.raises(ValueError, match="no cases"):
        run_function("def f(): pass", "f", [])


@pytest.mark.parametrize(
    "body",
    [
        "open('/etc/passwd').read()",
        "__import__('io').open('/etc/passwd').read()",
        "__import__('os').system('true')",
        "__import__('os').fork()",
        "__import__('posix').fork()",
        "__import__('subprocess').run(['true'])",
        "__import__('socket').create_connection(('127.0.0.1', 9))",
        "__import__('ctypes').CDLL(None)",
        "__import__('_thread').start_new_thread(print, ())",
        "__import__('_io').open('/etc/passwd').read()",
    ],
)
def test_forbidden_actions_are_refused(body: str) -> None:
    result = run_function(f"def f(x):\n    {body}\n    return x * 2", "f", DOUBLE)
    assert not result.passed
    assert "Error" in result.reason


def test_nothing_is_written_outside(tmp_path: Path) -> None:
    target = tmp_path / "out"
    attempts = [
        f"open({str(target)!r}, 'w').write('x')",
        f"[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'FileIO'][0]({str(target)!r}, 'w')",
    ]
    for attempt in attempts:
        assert not run_function(f"def f(x):\n    {attempt}\n    return x * 2", "f", DOUBLE).passed
    assert not target.exists()


def test_infinite_loop_is_stopped() -> None:
    started = time.monotonic()
    result = run_function("def f(x):\n    while True: pass", "f", DOUBLE, SandboxLimits(wall_seconds=1.0))
    assert not result.passed
    assert time.monotonic() - started < 4


def test_cpu_limit_is_enforced() -> None:
    result = run_function("def f(x):\n    while True: pass", "f", DOUBLE, SandboxLimits(wall_seconds=20, cpu_seconds=1))
    assert not result.passed
    assert "status" in result.reason


def test_memory_bomb_is_stopped() -> None:
    result = run_function("def f(x):\n    return len('a' * 10**10)", "f", DOUBLE)
    assert "MemoryError" in result.reason


@pytest.mark.parametrize(
    "source",
    [
        'print(\'{"values": ["2", "42"], "problem": ""}\')',
        "print('passed')\ndef f(x):\n    print('passed')\n    return 0",
        "import os\nos._exit(0)",
        "import posix\nposix._exit(0)",
        "class A(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x):\n    return A(0)",
        "class A:\n    def __repr__(self): return 'A'\ndef f(x):\n    return A()",
    ],
)
def test_faked_passes_do_not_count(source: str) -> None:
    assert not run_function(source, "f", DOUBLE).passed


def test_huge_output_is_bounded() -> None:
    result = run_function("def f(x):\n    return 'a' * 50_000_000", "f", DOUBLE)
    assert not result.passed
