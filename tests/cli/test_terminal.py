"""The commands on a real pseudo-terminal: what a user sees, what the answer leaves behind."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

# What a shell starts in the background, tests perhaps, ignores Ctrl-C, and so would its children.
PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {tests!r})
import redraft
from cli.fake_engine import FakeEngine
from redraft.cli import main

class Slow(FakeEngine):
    def stream(self, *args, **kwargs):
        for event in super().stream(*args, **kwargs):
            time.sleep(0.06)
            yield event
            for _ in range(3000 if "wait" in str(args) else 0):
                time.sleep(0.01)

redraft.load = lambda model, **options: Slow()
sys.exit(main(sys.argv[1:]))
"""


class Terminal:
    """A program with a pseudo-terminal as stdin, stdout and stderr."""

    def __init__(self, *args: str, **env: str) -> None:
        self.fd, follower = pty.openpty()
        program = PROGRAM.format(tests=str(Path(__file__).parents[1]))
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *args],
            stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
            env={**os.environ, "TERM": "xterm", **env},
        )  # fmt: skip
        os.close(follower)
        self.seen, self.mark = "", 0

    def _more(self, deadline: float) -> bool:
        """Read on; False where nothing comes before the deadline or the other side is closed."""
        if not select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        try:
            self.seen += os.read(self.fd, 4096).decode()
        except OSError:
            return False
        return True

    def until(self, text: str) -> None:
        """Read until `text` has been seen after the text of the last call."""
        deadline = time.monotonic() + 20
        while (at := self.seen.find(text, self.mark)) < 0:
            assert self._more(deadline), f"{text!r} is not in {self.seen[self.mark :]!r}"
        self.mark = at + len(text)

    def interrupt_until(self, text: str) -> None:
        """Press Ctrl-C until the program says `text`: one that arrives just before a blocking call waits behind it."""
        for _ in range(20):
            self.process.send_signal(signal.SIGINT)
            if select.select([self.fd], [], [], 1.0)[0]:
                return self.until(text)
        raise AssertionError(f"no answer to Ctrl-C after {self.seen[self.mark :]!r}")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def rest(self) -> str:
        """Everything from the start to the end of the program."""
        deadline = time.monotonic() + 20
        while self._more(deadline):
            pass
        self.process.wait(1)
        return self.seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


def test_generate_draws_then_prints_answer_and_figures() -> None:
    with closing(Terminal("generate", "demo", "hello")) as t:
        seen = t.rest()
    assert t.process.returncode == 0
    assert "\x1b[2m????????????????\x1b[0m" in seen
    assert "\x1b[1mYou said: hello\x1b[0m" in seen
    assert "\x1b[2KYou said: hello\r\n" in seen
    figures = seen.replace("\r\n", " ")
    assert "16 tokens · 2 forwards · 8.0 tokens/forward · " in figures
    assert " tok/s · steps per canvas 2 · seed 0 · w4 weights 1.5 MB" in figures


def test_a_dumb_terminal_gets_no_escape_codes() -> None:
    with closing(Terminal("generate", "demo", "hello", TERM="dumb")) as t:
        assert "\x1b" not in t.rest()


def test_ctrl_c_stops_generate_with_one_line() -> None:
    with closing(Terminal("generate", "demo", "wait")) as t:
        t.until("pass 1")
        t.process.send_signal(signal.SIGINT)
        assert t.rest().endswith("redraft: error: interrupted\r\n")
    assert t.process.returncode == 130


def test_chat_lives_through_ctrl_c_and_ends_with_ctrl_d() -> None:
    with closing(Terminal("chat", "demo")) as t:
        t.until("> ")
        t.type("wait\n")
        t.until("pass 1")
        t.interrupt_until("(stopped; this turn is forgotten)")
        t.until("> ")
        t.interrupt_until("(/exit or Ctrl-D ends the chat)")
        t.type("hi\n")
        t.until("w4 weights")
        t.until("> ")
        t.type("\x04")
        t.rest()
    assert t.process.returncode == 0
