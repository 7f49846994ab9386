"""Launch settings per GPU: tables, their checks, and the rule where there is none."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from redraft.errors import RedraftError
from redraft.kernels import tables
from redraft.kernels.attention import attention_settings
from redraft.kernels.sampling import SAMPLE
from redraft.kernels.tables import H200, Gpu, current_gpu, load_table, settings_for, table_path
from redraft.network import fused
from redraft.store.random import PRESETS


@dataclass(frozen=True)
class Settings(tables.LaunchSettings):
    block: int = 128
    num_stages: int = 4
    programs: int = 264
    max_registers: int | None = None

    def shared(self) -> int:
        return self.num_stages * H200.shared // 4


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    load_table.cache_clear()
    yield tmp_path
    load_table.cache_clear()


def write(gpu: str, settings: object) -> None:
    table_path(gpu).write_text(json.dumps({"gpu": gpu, "settings": settings}))


def test_file_names(folder: Path) -> None:
    assert table_path("NVIDIA H200").name == "nvidia-h200.json"
    assert table_path("NVIDIA GeForce RTX 5090 (x/y)").name == "nvidia-geforce-rtx-5090-x-y.json"


def test_a_table_replaces_the_fields_it_names(folder: Path) -> None:
    write("NVIDIA H200", {"head": {"block": 256, "max_registers": 64}})
    assert settings_for("head", Settings(), H200) == Settings(block=256, max_registers=64)
    assert settings_for("other", Settings(), H200) == Settings()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": {"blok": 1}}, "head: unknown field 'blok', expected one of block, num_stages, "),
        ({"head": {"block": "128"}}, "head: block is '128', expected a whole number of at least 1"),
        ({"head": {"block": 0}}, "head: block is 0"),
        ({"head": {"block": True}}, "head: block is True"),
        ({"head": {"block": None}}, "head: block is None"),
        ({"head": 3}, "not a table of launch settings"),
        ([], "not a table of launch settings"),
    ],
)
def test_bad_tables_are_named(folder: Path, settings: object, message: str) -> None:
    write("NVIDIA H200", settings)
    with pytest.raises(RedraftError, match=message) as error:
        settings_for("head", Settings(), H200)
    assert "nvidia-h200.json" in str(error.value) and "tune again" in str(error.value)


def test_a_damaged_table_is_named(folder: Path) -> None:
    table_path("NVIDIA H200").write_text('{"settings": {')
    with pytest.raises(RedraftError, match=r"nvidia-h200\.json: not a table of launch settings .*; delete it"):
        settings_for("head", Settings(), H200)


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (H200, Settings()),
        (Gpu("small", 66, 101_376), Settings(num_stages=1, programs=132)),
        (Gpu("half", 132, 163_840), Settings(num_stages=2)),
        (Gpu("large", 264, 400_000), Settings(programs=528)),
        (Gpu("toy", 1, 1), Settings(num_stages=1, programs=2)),
    ],
)
def test_without_a_table_the_defaults_are_fitted(folder: Path, gpu: Gpu, expected: Settings) -> None:
    assert settings_for("head", Settings(), gpu) == expected


def test_a_default_for_this_gpu_is_not_fitted_again(folder: Path) -> None:
    small = Gpu("small", 66, 101_376)
    assert settings_for("head", Settings(), small, fit=False) == Settings()
    write("small", {"head": {"block": 64}})
    load_table.cache_clear()
    assert settings_for("head", Settings(), small, fit=False) == Settings(block=64)


def test_passes_ask_the_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"attention.sliding": {"block_n": 32}, "sampling.statistics": {"num_warps": 4}}
    write("NVIDIA H200", entries)
    for module in (tables, fused):
        monkeypatch.setattr(module, "current_gpu", lambda device=None: H200)
    config, meta = PRESETS["26b-a4b"], torch.device("meta")
    heads = {layer.kind: fused.HeadBuffers(config, layer, 1, 256, meta) for layer in config.layers}
    assert heads["sliding"].settings == replace(attention_settings(1, 16, 8, 256, 256), block_n=32)
    assert heads["full"].settings == attention_settings(1, 16, 2, 256, 512)
    assert settings_for("sampling.statistics", SAMPLE) == replace(SAMPLE, num_warps=4)


def test_installed_tables_are_sound() -> None:
    for file in tables.FOLDER.glob("*.json"):
        content = json.loads(file.read_text())
        assert table_path(content["gpu"]) == file and load_table(content["gpu"]) == content["settings"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_without_a_gpu_there_is_nothing_to_fit() -> None:
    assert current_gpu() is None and settings_for("head", Settings()) == Settings()


@pytest.mark.gpu
def test_the_gpu_in_use() -> None:
    gpu = current_gpu()
    assert gpu is not None and gpu.sms > 0 and gpu.shared >= 48 << 10
