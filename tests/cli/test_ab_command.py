"""`redraft ab` as a user runs it, on the bundled model and on random weights."""

import json
import re
from pathlib import Path

import pytest
from cli.conftest import Run

from redraft.evaluate.models import TransformersEngine

CHARTS = {"accuracy.png", "speed.png", "answer_time.png", "steps_and_lengths.png"}


def test_a_full_report(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "ab"
    args = ("ab", "demo", "--arms", "bf16,w4", "--tasks", "demo:arithmetic,demo:code", "--limit", "2")
    outcome = run(*args, "--out", str(out), "--json")
    assert (outcome.code, outcome.err) == (0, "")
    report = outcome.json
    assert report == json.loads((out / "report.json").read_text())
    assert {p.name for p in out.iterdir()} == {"run.json", "items.jsonl", "report.json", "report.md", *CHARTS}
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in CHARTS)
    assert (report["together"], report["random_weights"], report["stand_ins"]) == (True, [], [])
    assert list(report["results"]["bf16"]) == ["arithmetic", "code", "all"]
    both = report["comparisons"][0]["tasks"]["all"]
    assert both["items"] == 4
    assert both["both_right"] + both["only_baseline_right"] == report["results"]["bf16"]["all"]["correct"]
    assert report["arms"][0]["about"]["experts"].startswith("transformers' ")
    assert report["probe"]["copy_gbps"] > 0 and report["environment"]["transformers"]
    records = [json.loads(line) for line in (out / "items.jsonl").read_text().splitlines()]
    assert [(r["arm"], r["id"]) for r in records] == [
        ("bf16", "arithmetic/0"), ("w4", "arithmetic/0"), ("w4", "arithmetic/1"), ("bf16", "arithmetic/1"),
        ("bf16", "code/0"), ("w4", "code/0"), ("w4", "code/1"), ("bf16", "code/1"),
    ]  # fmt: skip
    assert len({r["seed"] for r in records if r["id"] == "code/1"}) == 1
    page = (out / "report.md").read_text()
    for part in ("Accuracy", "Question by question", "Speed", "Time to answer", "Memory", "Machine"):
        assert f"\n## {part}\n" in page
    assert "took turns question by question" in page and "random weights" not in page

    again = run(*args, "--out", str(out))
    assert (again.code, again.err) == (0, f"redraft: note: {out} is complete; its report is written again\n")
    assert "exact McNemar p = " in again.out
    changed = run(*args, "--out", str(out), "--seed", "1")
    assert changed.code == 2
    assert "holds another comparison: seed is 0 there and 1 now" in changed.err


def test_interrupted_in_place_on_random_weights(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "ab"
    args = ("ab", "random:tiny", "--tasks", "gsm8k", "--limit", "2", "--fixed-steps", "3", "--in-place")
    whole, calls = TransformersEngine.generate, []

    def generate(self: TransformersEngine, prompt: str, **options: object) -> object:
        calls.append(prompt)
        if len(calls) == 3 + 2 + 1:  # warm-up and two answers of BF16, warm-up of W4
            raise KeyboardInterrupt
        return whole(self, prompt, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(TransformersEngine, "generate", generate)
    first = run(*args, "--out", str(out))
    kept = f"interrupted; answers are kept in {out}, the same command goes on from there"
    assert (first.code, first.err) == (130, f"redraft: error: {kept}\n")
    assert len((out / "items.jsonl.part").read_text().splitlines()) == 2
    second = run(*args, "--out", str(out), "--json")
    assert second.code == 0
    assert len(calls) == 6 + 3 + 2  # the BF16 arm was not asked again, not even to warm up
    report = second.json
    steps = report["results"]["bf16"]["gsm8k"]["steps_per_canvas"]
    assert steps == dict.fromkeys(("mean", "p10", "p50", "p90", "p99"), 3)
    assert {r["answer_tokens"]["p10"] for arm in report["results"].values() for r in arm.values()} == {16}
    assert set(report["arms"][0]["about"]) == {"experts", "attention"}
    page = (out / "report.md").read_text()
    assert "quality means nothing" in page and "stand-ins" in page and "NOT counterbalanced: --in-place" in page
    assert "McNemar p = " not in page.split("## Arms")[0]


@pytest.mark.gpu
def test_tiers_beside_stock_on_a_gpu(run: Run, tmp_path: Path) -> None:
    args = ("ab", "random:tiny", "--arms", "bf16,w4-off,w4-turbo,engine-w4", "--tasks", "gsm8k", "--limit", "3")
    outcome = run(*args, "--fixed-steps", "4", "--out", str(tmp_path / "ab"), "--json")
    assert outcome.code == 0
    results = {arm: tasks["gsm8k"] for arm, tasks in outcome.json["results"].items()}
    for figures in results.values():
        assert figures["peak_bytes"] > figures["weight_bytes"]
        assert (figures["steps_per_canvas"]["p10"], figures["steps_per_canvas"]["p99"]) == (4, 4)
    assert results["w4-off"]["weight_bytes"] < results["bf16"]["weight_bytes"]


def test_arms_that_do_not_fit_say_so(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redraft.evaluate.comparison.free_memory", lambda device: 1_000_000)
    args = ("ab", "random:tiny", "--tasks", "everyday", "--limit", "1", "--fixed-steps", "1")
    outcome = run(*args, "--out", str(tmp_path / "ab"))
    assert outcome.code == 0
    assert re.search(r"NOT counterbalanced: the arms take about 3\.\d MB together and 1\.0 MB were free", outcome.out)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--arms", "bf16"), "--arms is 'bf16', expected at least two"),
        (("--tasks", ","), "--tasks names no task"),
        (("--tasks", "demo:chess"), "task is 'demo:chess', expected one of"),
        (("--arms", "bf16,w4@no/such/thing/here"), "no such directory"),
        (("--max-new-tokens", "0"), "max_new_tokens is 0"),
    ],
)
def test_refusals_leave_no_folder(run: Run, tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    outcome = run("ab", "demo", *args, "--out", str(tmp_path / "ab"))
    assert outcome.code in (1, 2)
    assert message in outcome.err
    assert not (tmp_path / "ab").exists()
