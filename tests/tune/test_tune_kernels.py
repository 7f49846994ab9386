"""Tuning: wrong settings are refused, noise changes nothing, the table is whole or absent."""

import dataclasses
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from redraft.bench.cases.case import Changes, KernelCase, Problem, Scale
from redraft.bench.roofline import Work
from redraft.config import QuantSpec
from redraft.kernels import tables
from redraft.store.random import PRESETS
from redraft.tune.kernels import Trial, best, table, tune, write_table

SMALL = Scale(PRESETS["tiny"], QuantSpec(), 1, 8, torch.device("cpu"))


@dataclasses.dataclass(frozen=True)
class Blocks(tables.LaunchSettings):
    tiles = ("block",)
    block: int = 128


def build(scale: Scale, generator: torch.Generator, changes: Changes) -> Problem:
    """A copy that is wrong for block 7 and does not fit for block 1024."""
    block = changes.get("block", 128)
    if block == 1024:
        raise RuntimeError("out of resource: shared memory,\n  Required: 300000")
    x, out = torch.randn(8, generator=generator), torch.empty(8)
    factor = 2 if block == 7 else 1
    return Problem(lambda: out.copy_(x * factor), {"out": out}, lambda: {"out": x}, Work(1, 1), tolerance=1e-6)


COPY = KernelCase("copy", build, tuple({"block": b} for b in (7, 64, 256, 1024)))
TIMES = {None: 10.0, 7: 1.0, 64: 9.9, 256: 6.0}


def timer(case: KernelCase, scale: Scale, generator: object, problem: Problem, changes: Changes) -> float:
    return TIMES[changes.get("block")]


def test_wrong_and_impossible_settings_are_refused() -> None:
    trials = list(tune([KernelCase("fixed", build), COPY], SMALL, timer=timer))
    assert [(t.changes.get("block"), t.us) for t in trials] == [
        (None, 10.0), (7, None), (64, 9.9), (256, 6.0), (1024, None)
    ]  # fmt: skip
    assert "relative error" in trials[1].reason
    assert trials[4].reason == "RuntimeError: out of resource: shared memory, Required: 300000"
    assert best(trials) == {"copy": {"block": 256}}


def test_settings_that_are_refused_are_not_measured_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere a refused launch goes on with smaller settings."""

    def launch(settings: Blocks) -> None:
        if settings.block > 100:
            raise MemoryError("out of resource")

    def build_launching(scale: Scale, generator: torch.Generator, changes: Changes) -> Problem:
        problem = build(scale, generator, {})
        copy = problem.run
        problem.run = lambda: (tables.run("copy", Blocks(changes.get("block", 64)), None, launch), copy())
        return problem

    monkeypatch.setattr(tables, "REFUSED", (MemoryError,))
    monkeypatch.setattr(tables, "_ACCEPTED", {})
    case = KernelCase("copy", build_launching, ({"block": 256},))
    assert [t.reason for t in tune([case], SMALL, timer=timer)] == ["", "MemoryError: out of resource"]
    case.build(SMALL, torch.Generator(), {"block": 256}).run()


def test_the_default_stays_within_the_noise() -> None:
    trials = [Trial("copy", {}, 10.0), Trial("copy", {"block": 64}, 9.8)]
    assert best(trials) == {"copy": {}}
    refused = [Trial("copy", {}, None, "wrong"), Trial("copy", {"block": 64}, 20.0), Trial("none", {}, None, "wrong")]
    assert best(refused) == {"copy": {"block": 64}}


def test_the_table_is_what_settings_for_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an interrupted write leaves it as it was."""
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    tables.load_table.cache_clear()
    trials = list(tune([COPY], SMALL, timer=timer))
    gpu, path = tables.Gpu("Some GPU 1", 10, 100_000), tmp_path / "some-gpu-1.json"
    write_table(tables.table_path(gpu.name), table(trials, gpu.name, torch.device("cpu")))
    assert tables.settings_for("copy", Blocks(), gpu) == Blocks(block=256)
    tables.load_table.cache_clear()
    text = path.read_text()
    content = json.loads(text)
    assert content["versions"]["torch"] == torch.__version__
    assert {"kernel": "copy", "changes": {"block": 7}, "us": None, "refused": trials[1].reason} in content["measured"]
    monkeypatch.setattr(os, "fsync", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_table(path, {"settings": {}})
    assert [p.read_text() for p in tmp_path.iterdir()] == [text]
