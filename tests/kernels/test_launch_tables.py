"""Launch settings per GPU: tables, their checks, and the rule where there is none."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from redraft.errors import RedraftError
from redraft.kernels import experts, kv_write, launch, mlp, norms, rope, router, sampling, slots, tables
from redraft.kernels.attention import attention_bytes, attention_settings
from redraft.kernels.attention_canvas import canvas_settings
from redraft.kernels.sampling import SAMPLE
from redraft.kernels.tables import H200, Gpu, current_gpu, fitted, load_table, run, settings_for, smaller, table_path
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
        (None, r"nvidia-h200\.json: not a table of launch settings .*; delete it"),
    ],
)
def test_bad_tables_are_named(folder: Path, settings: object, message: str) -> None:
    write("NVIDIA H200", settings)
    if settings is None:
        table_path("NVIDIA H200").write_text('{"settings": {')
    with pytest.raises(RedraftError, match=message) as error:
        settings_for("head", Settings(), H200)
    assert "nvidia-h200.json" in str(error.value) and "tune again" in str(error.value)


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
    write("NVIDIA H200", {"attention.sliding": {"block_n": 32}, "sampling.statistics": {"num_warps": 4}})
    for module in (tables, fused):
        monkeypatch.setattr(module, "current_gpu", lambda device=None: H200)
    config, meta = PRESETS["26b-a4b"], torch.device("meta")
    heads = {layer.kind: fused.HeadBuffers(config, layer, 1, 256, meta) for layer in config.layers}
    assert heads["sliding"].settings == replace(attention_settings(1, 16, 8, 256, 256), block_n=32)
    assert heads["full"].settings == attention_settings(1, 16, 2, 256, 512)
    assert settings_for("sampling.statistics", SAMPLE) == replace(SAMPLE, num_warps=4)


SMALL = Gpu("small", 82, 101_376)  # a consumer card
DEFAULTS = (
    norms.ROW, rope.ROPE, kv_write.COMMIT, sampling.SAMPLE, sampling.PROBABILITIES, mlp.GATED, mlp.PRODUCT,
    router.ROUTER, slots.SLOTS, experts.EXPERTS,
)  # fmt: skip


@pytest.mark.parametrize("default", DEFAULTS, ids=lambda default: type(default).__name__)
def test_defaults_shrink_to_the_shared_memory_of_a_small_gpu(default: tables.LaunchSettings) -> None:
    assert fitted(default, H200) == default
    assert fitted(default, SMALL).shared() <= SMALL.shared


@pytest.mark.parametrize("rows", [1, 256, 1024])
@pytest.mark.parametrize(("kv_heads", "dim"), [(8, 256), (2, 512)])
def test_attention_is_planned_for_a_small_gpu(kv_heads: int, dim: int, rows: int) -> None:
    s = attention_settings(1, 16, kv_heads, rows, dim, SMALL)
    assert attention_bytes(s.block_m, s.block_n, s.num_stages, dim, s.block_d) <= SMALL.shared
    assert canvas_settings(1, 16, kv_heads, rows, dim, SMALL).shared() <= SMALL.shared


@pytest.mark.parametrize(("gpu", "fit"), [(H200, True), (SMALL, False)])
def test_products_beside_the_router_only_where_they_fit(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, fit: bool) -> None:
    monkeypatch.setattr(mlp, "current_gpu", lambda device=None: gpu)
    monkeypatch.setattr(launch, "from_hopper_on", lambda device: True)
    monkeypatch.setattr(launch, "TensorDescriptor", object())
    assert mlp.products_fit(torch.device("cuda")) == fit


def test_settings_shrink_by_stages_and_then_by_tiles() -> None:
    chain = [mlp.ProductSettings(rows=64, columns=32, depth=16, num_warps=8, num_stages=4)]
    while (less := smaller(chain[-1])) is not None:
        chain.append(less)
    shrunk = [(s.num_stages, s.rows, s.columns) for s in chain]
    assert shrunk == [(4, 64, 32), (2, 64, 32), (1, 64, 32), (1, 32, 32), (1, 16, 32), (1, 16, 16)]


def test_a_refused_launch_shrinks_and_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfResources(Exception):
        pass

    monkeypatch.setattr(tables, "REFUSED", (OutOfResources,))
    monkeypatch.setattr(tables, "_ACCEPTED", {})
    tried: list[int] = []

    def launch(settings: Settings) -> None:
        tried.append(settings.num_stages)
        if settings.num_stages > 1:
            raise OutOfResources

    for _ in range(2):
        run("head", None, Settings(), launch)
        run("head", Settings(num_stages=2), None, launch)
    assert tried == [4, 2, 1, 2, 1, 1, 1]
    run("other", Settings(num_stages=1), None, launch)

    def never(settings: Settings) -> None:
        raise OutOfResources(f"{settings.num_stages} stages")

    with pytest.raises(OutOfResources, match="1 stages"):
        run("head", None, Settings(), never)

    def broken(settings: Settings) -> None:
        tried.append(settings.num_stages)
        raise ValueError

    with pytest.raises(ValueError):
        run("another", None, Settings(), broken)
    assert tried[-2:] == [1, 4], "other errors are not for smaller settings"


def test_what_triton_raises_for_a_tile_too_large_is_a_refusal() -> None:
    assert {error.__name__ for error in launch.REFUSED} == {"OutOfResources", "PTXASError", "CompilationError"}


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
