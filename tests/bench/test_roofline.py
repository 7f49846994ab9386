"""The roofline, its plot, the work of a pass and the probe."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redraft.bench.probe import probe
from redraft.bench.roofline import Measured, Roofline, Work, check_plot, plot_roofline
from redraft.bench.timing import Timing
from redraft.bench.work import PARTS, Shapes, encode_work, pass_work
from redraft.config import QuantSpec
from redraft.errors import RedraftError, UsageError
from redraft.store.random import PRESETS

H200 = Roofline(gbps=4130, tflops=762)
REAL = Shapes(PRESETS["26b-a4b"], QuantSpec(), 2)


def test_the_floor_is_the_larger_limit() -> None:
    assert H200.ridge == pytest.approx(184.5, abs=0.1)
    assert H200.floor_ms(Work(4130e6, 0)) == pytest.approx(1) == H200.floor_ms(Work(0, 762e9))
    assert Work(1, 2) + Work(3, 4) == Work(2, 3) * 2 == Work.total([Work(1, 2), Work(3, 4)]) == Work(4, 6)
    assert Measured(Work(4130e6, 381e9), Timing(2.0, 1.0, 3.0, 7), H200).to_dict() == {
        "ms": 2.0, "ms_low": 1.0, "ms_high": 3.0, "runs": 7, "bytes": 4130e6, "flops": 381e9,
        "gbps": pytest.approx(2065), "tflops": pytest.approx(190.5), "floor_ms": pytest.approx(1),
        "share_of_roofline": pytest.approx(0.5),
    }  # fmt: skip


def test_the_real_pass_has_the_published_floor() -> None:
    """The figures derived by hand in the design: 12.36 GB of experts, one layer 100 us, the pass about 5.1 ms."""
    work = pass_work(REAL, 1, 1024)
    assert tuple(work) == PARTS
    assert work["experts"].bytes == pytest.approx(12.45e9, rel=0.01)
    assert H200.floor_ms(work["experts"]) / 30 == pytest.approx(0.100, rel=0.02)
    assert work["head"].flops == 2 * 256 * 262_144 * 2816
    assert work["dense"].bytes + work["attention"].bytes == pytest.approx(3.6e9, rel=0.1)
    assert 5.0 < sum(H200.floor_ms(w) for w in work.values()) < 5.7


def test_work_grows_as_it_should() -> None:
    one, four = (pass_work(REAL, batch, 1024) for batch in (1, 4))
    assert four["head"].flops == 4 * one["head"].flops
    assert one["experts"].bytes < four["experts"].bytes < 1.1 * one["experts"].bytes
    dense = pass_work(replace(REAL, spec=None), 1, 1024)
    assert dense["experts"].bytes / one["experts"].bytes == pytest.approx(16 / 4.33, rel=0.02)
    near, far = (pass_work(REAL, 1, prefix)["attention"] for prefix in (1024, 8192))
    full = 5 * 2 * (8192 - 1024) * 2 * 512 * 2  # only the full layers read the longer prefix
    assert far.bytes - near.bytes == full
    assert encode_work(REAL, 1024).flops > 3 * one["dense"].flops


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Of a product and of a copy; a plot that fails leaves the old one."""
    figure = pytest.importorskip("matplotlib.figure")
    works = {"head": (Work(1e6, 1e9), 0.01), "copy": (Work(1e6, 0), 0.001)}
    points = {name: Measured(work, Timing.of([ms]), H200) for name, (work, ms) in works.items()}
    path = tmp_path / f"roof{suffix}"
    check_plot(path)
    plot_roofline(path, H200, points, "a test")
    assert path.stat().st_size > 1000 and [*tmp_path.iterdir()] == [path]
    drawn = path.read_bytes()

    def fail(self: Any, file: Path, **options: Any) -> None:
        Path(file).write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(figure.Figure, "savefig", fail)
    with pytest.raises(KeyboardInterrupt):
        plot_roofline(path, H200, {}, "")
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [drawn]


def test_plots_are_refused_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"roof\.txt: a plot is one of \.png"):
        check_plot(tmp_path / "roof.txt")
    with pytest.raises(UsageError, match="no such directory"):
        check_plot(tmp_path / "none" / "roof.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RedraftError, match=r"pip install 'redraft\[plot\]'"):
        check_plot(tmp_path / "roof.png")


def test_probe_measures_a_cpu() -> None:
    result = probe(torch.device("cpu"), seconds=0.01)
    # A machine between a toy and a supercomputer; a wrong unit would be off by a thousand.
    assert 0.5 < result.copy_gbps < 2000 and 0.5 < result.read_gbps < 2000
    assert 0.001 < result.matmul_tflops["float32"] < 50 and set(result.matmul_tflops) == {"float32", "bfloat16"}
    assert 0.1 < result.launch_us < 1000 and result.graph_launch_us is None
    assert result.roofline.gbps == max(result.copy_gbps, result.read_gbps)
    assert result.to_dict()["ridge_flop_per_byte"]["float32"] == pytest.approx(result.roofline.ridge)


@pytest.mark.gpu
def test_probe_measures_a_gpu() -> None:
    result = probe(torch.device("cuda"), seconds=0.05)
    assert result.matmul_tflops["bfloat16"] > 10 and result.roofline_dtype == "bfloat16"
    assert result.graph_launch_us is not None and result.graph_launch_us < result.launch_us
