"""probe, bench, profile and tune from the command line, on a CPU."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from cli.conftest import Outcome, Run
from tiny import CANVAS

from redraft.bench import kernels, rivals, step
from redraft.bench.work import PARTS

QUICK = "--device cpu --prompt-tokens 8 --passes 1"
TINY_STEP = f"bench step random:tiny {QUICK} --rounds 1 --json"
COMPARE, SERVE = "compare-ar random:tiny --device cpu", "bench serve-loop demo"

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")


def measured(run: Run, command: str, *shown: str) -> Outcome:
    """A command that succeeds and says what is `shown`."""
    outcome = run(*command.split())
    assert outcome.code == 0, outcome.err
    for text in shown:
        assert text in outcome.out
    return outcome


def test_probe(run: Run, limits: None) -> None:
    report = measured(run, "probe --device cpu --json", "memory, copy", "100 GB/s").json
    assert report["copy_gbps"] == 100.0 and report["ridge_flop_per_byte"] == {"float32": 5.0, "bfloat16": 1.0}
    assert report["environment"]["torch"] == torch.__version__


def test_bench_step(run: Run, limits: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "roof.png"
    shown = ("self-conditioning", "gaps", "whole pass", "encode of the prompt", "roofline measured in this run")
    report = measured(run, f"{TINY_STEP} --plot {plot}", *shown).json
    assert set(report["parts"]) == set(PARTS)
    assert (report["model"], report["batch"], report["prompt_tokens"]) == ("random:tiny", 1, 8)
    assert report["probe"]["device"] == "test cpu"
    assert plot.stat().st_size > 1000


def test_bench_batch(run: Run, limits: None) -> None:
    outcome = measured(run, f"bench batch random:tiny {QUICK} --sizes 1,2 --rounds 1 --json", "ms per canvas")
    assert [row["canvases"] for row in outcome.json["batches"]] == [1, 2]


def test_profile(run: Run, limits: None) -> None:
    report = measured(run, f"profile random:tiny {QUICK} --json", "Amdahl's bound", "No GPU").json
    assert report["gpu"] is None and set(report["amdahl"]) == {*PARTS, "gaps"}


def test_serve_loop_answers_every_request_at_every_rate(run: Run, tiny_dir: Path) -> None:
    load = f"--requests 5 --slots 2 --prompt-tokens 6 --max-new-tokens {2 * CANVAS} --passes 3"
    command = f"bench serve-loop {tiny_dir} --rates inf,1000 {load} --weights bf16 --device cpu --json"
    told = measured(run, command, "at once", "first draft").json
    at_once, spread = told["rates"]
    assert (told["slots"], told["passes"], at_once["rate"], spread["rate"]) == (2, 3, None, 1000.0)
    for result in (at_once, spread):
        assert result["requests"] == 5 and result["tokens_per_second"] > result["requests_per_second"]
        by_width = {int(width): count for width, count in result["passes_by_requests"].items()}
        assert sum(width * count for width, count in by_width.items()) == 5 * 2 * 3
        assert set(by_width) <= {1, 2} and sum(by_width.values()) == result["passes"]
        assert 0 < result["first_draft_seconds"]["p50"] < result["answer_seconds"]["p90"] <= result["seconds"]
    assert at_once["mean_requests_per_pass"] > 1.5


@without_gpu
def test_bench_kernels_only_checks_without_a_gpu(run: Run) -> None:
    outcome = measured(run, "bench kernels --only mlp.gated --json", "there are no speeds to report")
    report = outcome.json
    assert "% of roofline" not in outcome.out and report["probe"] is None
    assert [row["kernel"] for row in report["kernels"]] == ["mlp.gated", "mlp.gated_product"]
    for row in report["kernels"]:
        assert row["passed"] and row["error"] <= row["tolerance"] and "us" not in row


def test_a_wrong_kernel_is_exit_code_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = kernels.KernelResult("norms.x", kernels.Gate(False, 0.5, "out: relative error"), 1e-3)
    monkeypatch.setattr(kernels, "bench_kernels", lambda *args, **options: iter([wrong]))
    outcome = run("bench", "kernels", "--device", "cpu", "--json")
    assert outcome.code == 1 and outcome.err == "redraft: error: 1 of 1 kernels are wrong: norms.x\n"
    assert not outcome.json["kernels"][0]["passed"]


@without_gpu
def test_tuning_needs_a_gpu(run: Run, tmp_path: Path) -> None:
    outcome = run("tune", "kernels", "--out", str(tmp_path / "t.json"))
    error = "redraft: error: tuning times kernels on a GPU, and torch sees none here\n"
    assert (outcome.code, outcome.out, outcome.err) == (1, "", error)
    assert not list(tmp_path.iterdir())


def test_a_group_alone_lists_its_commands(run: Run) -> None:
    for group in ("bench", "tune"):
        measured(run, group, "kernels")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("bench step", "Missing argument 'MODEL' (see 'redraft bench step --help')"),
        ("bench steps demo", "No such command 'steps'"),
        ("bench step random:tiny --vs vllm", "--vs is 'vllm', expected one of transformers, "),
        ("bench step random:tiny --batch 0", "--batch"),
        (f"bench step random:nano {QUICK}", "random:nano: no such random model"),
        ("bench step random:tiny --plot roof.gif", "roof.gif: a plot is one of .png, .svg, .pdf"),
        ("bench step random:tiny --prompt-tokens 5000 --device cpu", "exceeds the context of 4096"),
        ("bench batch random:tiny --sizes 1,x", "--sizes is '1,x', expected numbers of canvases"),
        ("bench kernels --only zzz --device cpu", "no kernel is called like 'zzz'"),
        (f"{COMPARE} --sizes 1,x", "--sizes is '1,x', expected numbers such as 1,4,16"),
        (f"{COMPARE} --fixed-passes 0", "--fixed-passes is '0'"),
        (f"{COMPARE} --sizes 1,4 --limit 2", "2 prompts do not make a batch of 4"),
        ("compare-ar random:tiny --sizes 1,3 --limit 4", "4 prompts cannot be split into batches of 3"),
        (f"{COMPARE} --sizes 32", "26 prompts do not make a batch of 32"),
        (f"{COMPARE} --task chess", "task is 'chess', expected one of"),
        (f"{COMPARE} --plot x.gif", "x.gif: a plot is one of .png"),
        ("compare-ar random:tiny --prompt-tokens 5000 --sizes 1 --device cpu", "exceeds the context of 4096"),
        ("probe --device tpu", "device is 'tpu', expected cpu, cuda or cuda:N"),
        *(
            (f"{SERVE} --rates={rates}", f"--rates is {rates!r}, expected requests a second such as 1,4,inf")
            for rates in ("", "0", "-1", "two", "nan", "1,,2")
        ),
    ],
)
def test_bad_usage_is_one_line(run: Run, limits: None, command: str, message: str) -> None:
    outcome = run(*command.split())
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.error.startswith("redraft: error: ") and message in outcome.error


def test_a_failed_rival_is_reported_after_our_figures(run: Run, limits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "build_model", Mock(side_effect=ImportError("no transformers")))
    outcome = run(*TINY_STEP.split(), "--vs", "transformers")
    assert outcome.code == 1 and "whole pass" in outcome.out
    assert outcome.json["failed"] == {"transformers": "ImportError: no transformers"}
    assert outcome.error == "redraft: error: transformers could not be measured: ImportError: no transformers"


def test_out_of_memory_is_one_line(run: Run, limits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    out_of_memory = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
    monkeypatch.setattr(step, "bench_step", Mock(side_effect=out_of_memory))
    outcome = run(*TINY_STEP.split())
    assert outcome.code == 1
    assert outcome.error == "redraft: error: cpu ran out of memory; use fewer canvases or a shorter prompt"
