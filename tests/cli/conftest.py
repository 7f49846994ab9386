"""Run the command line in this process, with the fake engine in the place of a model."""

import io
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from cli.fake_engine import FakeEngine

import redraft
from redraft.bench import compare_ar, probe, step
from redraft.bench.probe import Probe
from redraft.cli import main

LIMITS = Probe("test cpu", 100.0, 90.0, {"float32": 0.5, "bfloat16": 0.1}, 1.0, None, "float32")


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The last line of stdout."""
        return json.loads(self.out.splitlines()[-1])

    @property
    def error(self) -> str:
        """The last line of stderr."""
        return self.err.splitlines()[-1]


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

    def call(*args: object, stdin: str | bytes = "") -> Outcome:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        return Outcome(main([str(arg) for arg in args]), *capsys.readouterr())

    return call


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is not measured again for every test, parts are timed briefly, and prompts are answered once."""
    monkeypatch.setattr(step, "PARTS_SECONDS", 0.0)
    monkeypatch.setattr(compare_ar, "LEAST_BATCHES", 1)
    monkeypatch.setattr(probe, "probe", lambda device: LIMITS)
