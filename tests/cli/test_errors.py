"""Exit codes and one clear line: whatever goes wrong, with every command."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Run
from cli.fake_engine import FakeEngine

import redraft
from redraft.errors import CheckpointError, UsageError

EDIT = ("eval", "demo", "--task", "demo:edit")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (CheckpointError("m/config.json: file is missing"), 1, "m/config.json: file is missing"),
        (UsageError("seed is -1"), 2, "seed is -1"),
        (UsageError("two\nlines"), 2, "two lines"),
        (OSError(errno.ENOSPC, "no space", "/x/part"), 1,
         "/x/part: No space left on device; free some space and run it again"),
        (PermissionError(errno.EACCES, "denied", b"/x"), 1,
         "/x: Permission denied; check the permissions or choose another place"),
        (ZeroDivisionError("a\nb"), 1,
         "internal error: ZeroDivisionError: a b (run again with --debug for the traceback)"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)  # fmt: skip
def test_every_error_is_one_line_and_a_code(run: Run, engine: FakeEngine, error, code: int, line: str) -> None:
    engine.failure = error
    assert run("generate", "demo", "hi") == (code, "", f"redraft: error: {line}\n")


@pytest.mark.parametrize("args", [("--debug", "generate", "demo", "hi"), ("generate", "demo", "--debug", "hi")])
def test_debug_shows_the_traceback_wherever_it_stands(run: Run, engine: FakeEngine, args: tuple[str, ...]) -> None:
    engine.failure = ZeroDivisionError("why")
    outcome = run(*args)
    assert outcome.code == 1 and outcome.err.startswith("Traceback (most recent call last):")
    assert "raise self.failure" in outcome.err


def test_debug_after_two_dashes_is_a_prompt(run: Run, engine: FakeEngine) -> None:
    assert run("generate", "demo", "--", "--debug").out == "You said: --debug\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate",), "Missing argument 'MODEL' (see 'redraft generate --help')"),
        (("generate", "demo", "hi", "--colour"), "--colour"),
        (("evil",), "No such command 'evil'"),
        (("--nothing",), "--nothing"),
        (("eval", "demo"), "Missing option '--task'"),
        ((*EDIT, "--limit", "0"), "--limit"),
        (("eval", "demo", "--task", "mmlu"), "task is 'mmlu', expected one of gsm8k, humaneval, "),
        (("generate", "demo", "hi", "--seed", "x"), "--seed"),
        (("generate", "demo", "hi", "--seed", "-1"), "seed is -1, expected a whole number from 0 to 2^63 - 1"),
        (("generate", "demo", "hi", "--steps", "0"), "max_denoising_steps is 0"),
        (("chat", "demo", "--entropy-bound", "nan"), "entropy_bound is nan"),
        (("demo", "--max-new-tokens", "-5"), "max_new_tokens is -5"),
        (("generate", "demo", "hi", "--weights", "w3"), "weights is 'w3', expected one of w4, bf16"),
        ((*EDIT, "--tier", "warp"), "tier is 'warp', expected one of off, bitexact, turbo"),
    ],
)
def test_bad_usage_exits_2_before_a_model_is_loaded(run: Run, monkeypatch, args: tuple[str, ...], message: str) -> None:
    monkeypatch.setattr(redraft, "load", lambda *a, **k: pytest.fail("loaded"))
    outcome = run(*args)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert outcome.err.startswith("redraft: error: ") and message in outcome.err


def test_version_and_bare_command(run: Run) -> None:
    assert run("--version").out == f"redraft {redraft.__version__}\n"
    bare = run()
    assert bare.code == 0
    assert all(name in bare.out for name in ("demo", "generate", "chat", "quantize", "inspect", "eval"))


@pytest.mark.parametrize(
    ("code", "module"),
    [
        ("from redraft.cli import main; main(['--help'])", "torch"),  # that help is quick
        ("import redraft.bench.kernels", "triton"),  # that `bench kernels` can still choose its interpreter
    ],
)
def test_what_is_not_imported(code: str, module: str) -> None:
    code = f"import sys; {code}; sys.exit({module!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def version_into(stdout: Any) -> tuple[int, str]:
    """Exit code and stderr of a process that prints its version."""
    command = [sys.executable, "-m", "redraft", "--version"]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_reported() -> None:
    with open("/dev/full", "w") as full:
        line = "redraft: error: No space left on device; free some space and run it again\n"
        assert version_into(full) == (1, line)


def test_a_reader_that_leaves_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert version_into(writer) == (1, "")
    os.close(writer)
