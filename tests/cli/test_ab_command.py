"""`redraft ab` as a user runs it, on the bundled model and on random weights."""

import json
import re
from pathlib import Path

import pytest
from cli.conftest import Run

from redraft.evaluate.models import TransformersEngine

CHARTS = {"accuracy.png", "speed.png", "answer_time.png", "steps_and_lengths.png"}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "ab"


@pytest.fixture
def ab(run: Run, out: Path) -> Run:
    """`redraft ab` with a line of arguments and its report in `out`."""
    return lambda line: run("ab", *line.split(), "--out", str(out))


def test_a_full_report(ab: Run, out: Path) -> None:
    line = "demo --arms bf16,w4 --tasks demo:arithmetic,demo:code --limit 2"
    outcome = ab(f"{line} --json")
    assert (outcome.code, outcome.err) == (0, "")
    report = outcome.json
    assert report == json.loads((out / "report.json").read_text())
    assert {p.name for p in out.iterdir()} == {"run.json", "items.jsonl", "report.json", "report.md", *CHARTS}
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in CHARTS)
    assert (report["together"], report["random_weights"], report["stand_ins"]) == (True, [], [])
    assert list(report["results"]["bf16"]) == ["arithmetic", "code", "all"]
    both, right = report["comparisons"][0]["tasks"]["all"], report["results"]["bf16"]["all"]["correct"]
    assert (both["items"], both["both_right"] + both["only_baseline_right"]) == (4, right)
    assert report["arms"][0]["about"]["experts"].startswith("transformers' ")
    assert report["probe"]["copy_gbps"] > 0 and report["environment"]["transformers"]
    records = [json.loads(each) for each in (out / "items.jsonl").read_text().splitlines()]
    turns = [("bf16", 0), ("w4", 0), ("w4", 1), ("bf16", 1)]
    asked = [(arm, f"{task}/{index}") for task in ("arithmetic", "code") for arm, index in turns]
    assert [(r["arm"], r["id"]) for r in records] == asked
    assert len({r["seed"] for r in records if r["id"] == "code/1"}) == 1
    page = (out / "report.md").read_text()
    for part in ("Accuracy", "Question by question", "Speed", "Time to answer", "Memory", "Machine"):
        assert f"\n## {part}\n" in page
    assert "took turns question by question" in page and "random weights" not in page

    again = ab(line)
    assert (again.code, again.err) == (0, f"redraft: note: {out} is complete; its report is written again\n")
    assert "exact McNemar p = " in again.out
    changed = ab(f"{line} --seed 1")
    assert changed.code == 2
    assert "holds another comparison: seed is 0 there and 1 now" in changed.err


def test_interrupted_in_place_on_random_weights(ab: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "random:tiny --tasks gsm8k --limit 2 --fixed-steps 3 --in-place"
    whole, calls = TransformersEngine.generate, []

    def generate(self: TransformersEngine, prompt: str, **options: object) -> object:
        calls.append(prompt)
        if len(calls) == 3 + 2 + 1:  # warm-up and two answers of BF16, warm-up of W4
            raise KeyboardInterrupt
        return whole(self, prompt, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(TransformersEngine, "generate", generate)
    first = ab(line)
    kept = f"interrupted; answers are kept in {out}, the same command goes on from there"
    assert (first.code, first.err) == (130, f"redraft: error: {kept}\n")
    assert len((out / "items.jsonl.part").read_text().splitlines()) == 2
    second = ab(f"{line} --json")
    assert second.code == 0
    assert len(calls) == 6 + 3 + 2  # the BF16 arm was not asked again, not even to warm up
    report = second.json
    assert report["results"]["bf16"]["gsm8k"]["steps_per_canvas"] == dict.fromkeys(
        ("mean", "p10", "p50", "p90", "p99"), 3
    )
    assert {r["answer_tokens"]["p10"] for arm in report["results"].values() for r in arm.values()} == {16}
    assert set(report["arms"][0]["about"]) == {"experts", "attention"}
    page = (out / "report.md").read_text()
    assert "quality means nothing" in page and "stand-ins" in page and "NOT counterbalanced: --in-place" in page
    assert "McNemar p = " not in page.split("## Arms")[0]


@pytest.mark.gpu
def test_tiers_beside_stock_on_a_gpu(ab: Run) -> None:
    outcome = ab("random:tiny --arms bf16,w4-off,w4-turbo,engine-w4 --tasks gsm8k --limit 3 --fixed-steps 4 --json")
    assert outcome.code == 0
    results = {arm: tasks["gsm8k"] for arm, tasks in outcome.json["results"].items()}
    for figures in results.values():
        assert figures["peak_bytes"] > figures["weight_bytes"]
        assert (figures["steps_per_canvas"]["p10"], figures["steps_per_canvas"]["p99"]) == (4, 4)
    assert results["w4-off"]["weight_bytes"] < results["bf16"]["weight_bytes"]


def test_arms_that_do_not_fit_say_so(ab: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redraft.evaluate.comparison.free_memory", lambda device: 1_000_000)
    outcome = ab("random:tiny --tasks everyday --limit 1 --fixed-steps 1")
    assert outcome.code == 0
    assert re.search(r"NOT counterbalanced: the arms take about 3\.\d MB together and 1\.0 MB were free", outcome.out)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("--arms bf16", "--arms is 'bf16', expected at least two"), ("--tasks ,", "--tasks names no task"),
        ("--tasks demo:chess", "task is 'demo:chess', expected one of"), ("--max-new-tokens 0", "max_new_tokens is 0"),
        ("--arms bf16,w4@no/such/thing/here", "no such directory"),
    ],
)  # fmt: skip
def test_refusals_leave_no_folder(ab: Run, out: Path, changed: str, message: str) -> None:
    outcome = ab(f"demo {changed}")
    assert outcome.code in (1, 2) and message in outcome.err
    assert not out.exists()
