"""Run the command line in this process, with the fake engine in the place of a model."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from cli.fake_engine import FakeEngine

import redraft
from redraft.cli import main


@dataclass
class Outcome:
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """What `redraft.load` gives in this test."""
    fake = FakeEngine()
    monkeypatch.setattr(redraft, "load", lambda model, **options: fake)
    return fake


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call `run("generate", "demo", "hi", stdin="...")` as a shell would, with pipes instead of a terminal."""

    def call(*args: str, stdin: str | bytes = "") -> Outcome:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        code = main(list(args))
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call
