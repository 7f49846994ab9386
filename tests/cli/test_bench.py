"""probe, bench, profile and tune from the command line, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli.conftest import Run

from redraft.bench import step
from redraft.bench.work import PARTS

QUICK = ("--device", "cpu", "--prompt-tokens", "8", "--passes", "1")
COMPARE = ("compare-ar", "random:tiny", "--device", "cpu")


def test_probe(run: Run, limits: None) -> None:
    outcome = run("probe", "--device", "cpu", "--json")
    assert outcome.code == 0
    assert "memory, copy" in outcome.out and "100 GB/s" in outcome.out
    report = outcome.json
    assert report["copy_gbps"] == 100.0 and report["ridge_flop_per_byte"] == {"float32": 5.0, "bfloat16": 1.0}
    assert report["environment"]["torch"] == torch.__version__


def test_bench_step(run: Run, limits: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "roof.png"
    outcome = run("bench", "step", "random:tiny", *QUICK, "--rounds", "1", "--json", "--plot", str(plot))
    assert outcome.code == 0, outcome.err
    for text in ("self-conditioning", "gaps", "whole pass", "encode of the prompt", "roofline measured in this run"):
        assert text in outcome.out
    report = outcome.json
    assert set(report["parts"]) == set(PARTS)
    assert (report["model"], report["batch"], report["prompt_tokens"]) == ("random:tiny", 1, 8)
    assert report["probe"]["device"] == "test cpu"
    assert plot.stat().st_size > 1000


def test_bench_batch(run: Run, limits: None) -> None:
    outcome = run("bench", "batch", "random:tiny", *QUICK, "--sizes", "1,2", "--rounds", "1", "--json")
    assert [row["canvases"] for row in outcome.json["batches"]] == [1, 2]
    assert "ms per canvas" in outcome.out


def test_profile(run: Run, limits: None) -> None:
    outcome = run("profile", "random:tiny", *QUICK, "--json")
    assert "Amdahl's bound" in outcome.out and "No GPU" in outcome.out
    report = outcome.json
    assert report["gpu"] is None and set(report["amdahl"]) == {*PARTS, "gaps"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_bench_kernels_only_checks_without_a_gpu(run: Run) -> None:
    outcome = run("bench", "kernels", "--only", "mlp.gated", "--json")
    assert outcome.code == 0, outcome.err
    assert "there are no speeds to report" in outcome.out and "% of roofline" not in outcome.out
    report = outcome.json
    assert report["probe"] is None
    assert [row["kernel"] for row in report["kernels"]] == ["mlp.gated", "mlp.gated_product"]
    for row in report["kernels"]:
        assert row["passed"] and row["error"] <= row["tolerance"] and "us" not in row


def test_a_wrong_kernel_is_exit_code_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from redraft.bench import kernels

    wrong = kernels.KernelResult("norms.x", kernels.Gate(False, 0.5, "out: relative error"), 1e-3)
    monkeypatch.setattr(kernels, "bench_kernels", lambda *args, **options: iter([wrong]))
    outcome = run("bench", "kernels", "--device", "cpu", "--json")
    assert outcome.code == 1 and outcome.err == "redraft: error: 1 of 1 kernels are wrong: norms.x\n"
    assert not outcome.json["kernels"][0]["passed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_tuning_needs_a_gpu(run: Run, tmp_path: Path) -> None:
    outcome = run("tune", "kernels", "--out", str(tmp_path / "t.json"))
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == "redraft: error: tuning times kernels on a GPU, and torch sees none here\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("group", ["bench", "tune"])
def test_a_group_alone_lists_its_commands(run: Run, group: str) -> None:
    outcome = run(group)
    assert outcome.code == 0 and "kernels" in outcome.out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("bench", "step"), "Missing argument 'MODEL' (see 'redraft bench step --help')"),
        (("bench", "steps", "demo"), "No such command 'steps'"),
        (("bench", "step", "random:tiny", "--vs", "vllm"), "--vs is 'vllm', expected one of transformers, "),
        (("bench", "step", "random:tiny", "--batch", "0"), "--batch"),
        (("bench", "step", "random:nano", *QUICK), "random:nano: no such random model"),
        (("bench", "step", "random:tiny", "--plot", "roof.gif"), "roof.gif: a plot is one of .png, .svg, .pdf"),
        (("bench", "step", "random:tiny", "--prompt-tokens", "5000", "--device", "cpu"), "exceeds the context of 4096"),
        (("bench", "batch", "random:tiny", "--sizes", "1,x"), "--sizes is '1,x', expected numbers of canvases"),
        (("bench", "kernels", "--only", "zzz", "--device", "cpu"), "no kernel is called like 'zzz'"),
        ((*COMPARE, "--sizes", "1,x"), "--sizes is '1,x', expected numbers such as 1,4,16"),
        ((*COMPARE, "--fixed-passes", "0"), "--fixed-passes is '0'"),
        ((*COMPARE, "--sizes", "1,4", "--limit", "2"), "2 prompts do not make a batch of 4"),
        (
            ("compare-ar", "random:tiny", "--sizes", "1,3", "--limit", "4"),
            "4 prompts cannot be split into batches of 3",
        ),
        ((*COMPARE, "--sizes", "32"), "26 prompts do not make a batch of 32"),
        ((*COMPARE, "--task", "chess"), "task is 'chess', expected one of"),
        ((*COMPARE, "--plot", "x.gif"), "x.gif: a plot is one of .png"),
        (
            ("compare-ar", "random:tiny", "--prompt-tokens", "5000", "--sizes", "1", "--device", "cpu"),
            "exceeds the context of 4096",
        ),
        (("probe", "--device", "tpu"), "device is 'tpu', expected cpu, cuda or cuda:N"),
    ],
)
def test_bad_usage_is_one_line(run: Run, limits: None, args: tuple[str, ...], message: str) -> None:
    outcome = run(*args)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.error.startswith("redraft: error: ") and message in outcome.error


def test_a_failed_rival_is_reported_after_our_figures(run: Run, limits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from redraft.bench import rivals

    def fail(*args: object) -> None:
        raise ImportError("no transformers")

    monkeypatch.setattr(rivals, "build_model", fail)
    outcome = run("bench", "step", "random:tiny", *QUICK, "--rounds", "1", "--vs", "transformers", "--json")
    assert outcome.code == 1 and "whole pass" in outcome.out
    assert outcome.json["failed"] == {"transformers": "ImportError: no transformers"}
    line = "redraft: error: transformers could not be measured: ImportError: no transformers"
    assert outcome.error == line


def test_out_of_memory_is_one_line(run: Run, limits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(step, "bench_step", fail)
    outcome = run("bench", "step", "random:tiny", *QUICK)
    assert outcome.code == 1
    assert outcome.error == "redraft: error: cpu ran out of memory; use fewer canvases or a shorter prompt"


def test_serve_loop(run: Run, tiny_dir: Path) -> None:
    options = "--rates 500,inf --requests 3 --slots 2 --prompt-tokens 4 --max-new-tokens 8 --passes 2 --weights bf16"
    outcome = run("bench", "serve-loop", str(tiny_dir), *options.split(), "--device", "cpu", "--json")
    told = outcome.json
    assert (outcome.code, told["slots"], told["passes"], len(told["rates"])) == (0, 2, 2, 2)
    assert "at once" in outcome.out and "first draft" in outcome.out


@pytest.mark.parametrize("rates", ["", "0", "-1", "two", "nan", "1,,2"])
def test_serve_loop_refuses_bad_rates(run: Run, rates: str) -> None:
    outcome = run("bench", "serve-loop", "demo", "--rates", rates)
    assert outcome.code == 2
    assert f"--rates is {rates!r}, expected requests a second such as 1,4,inf" in outcome.err
