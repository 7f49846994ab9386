"""`redraft eval`: the report and the table, the results file, resuming."""

import json
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from cli.conftest import Run
from cli.fake_engine import FakeEngine

from redraft.evaluate.demo import TASKS

EDIT = ("eval", "demo", "--task", "demo:edit")
ITEMS = TASKS["edit"].items(4)
WRONG = ITEMS[2].prompt
NO_FILE = "HumanEval.jsonl.gz does not exist; --data needs a directory that holds HumanEval.jsonl.gz"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "r.jsonl"


@pytest.fixture
def scholar(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Right on every item of `edit` but the third."""
    answers = {item.prompt: item.expected for item in ITEMS} | {WRONG: "?"}
    monkeypatch.setattr(engine, "answer_to", lambda prompt: answers[prompt])
    return engine


def test_report(run: Run, scholar: FakeEngine) -> None:
    outcome = run(*EDIT, "--limit", "4", "--seed", "3", "--batch-size", "3", "--json")
    assert outcome.err == ""
    report, edit = outcome.json, outcome.json["tasks"]["edit"]
    assert (edit["items"], edit["correct"], edit["accuracy"]) == (4, 3, 0.75)
    assert edit["interval"] == pytest.approx([0.3006, 0.9544], abs=1e-4)
    assert edit["tokens"] == sum(len(i.expected) + 1 for i in ITEMS) - len(ITEMS[2].expected) + 1
    assert edit["tokens_per_forward"] == pytest.approx(edit["tokens"] / edit["forwards"])
    assert edit["steps_per_canvas"] == {"mean": 2.0, "p50": 2, "p90": 2}
    assert edit["answer_seconds"]["mean"] == pytest.approx(0.5, abs=0.2)  # the fake engine's own clock
    assert edit["cut_off"] == 0
    assert (report["seed"], report["limit"], report["batch_size"], report["reused_items"]) == (3, 4, 3, 0)
    assert (report["model"], report["weights"], report["settings"]) == ("demo", "w4", {})
    assert scholar.batches == [3, 1]
    assert "all" not in report


def test_all_tasks_are_summed(run: Run, engine: FakeEngine) -> None:
    report = run("eval", "demo", "--task", "demo:all", "--limit", "1", "--json").json
    assert list(report["tasks"]) == list(TASKS)
    assert (report["all"]["items"], report["all"]["correct"]) == (len(TASKS), 0)


@pytest.mark.parametrize(("tier", "sizes"), [("turbo", [4]), ("bitexact", [1, 1, 1, 1])])
def test_table_and_batch_size_by_default(run: Run, scholar: FakeEngine, tier: str, sizes: list[int]) -> None:
    scholar.tier = tier
    lines = run(*EDIT, "--limit", "4").out.splitlines()
    assert scholar.batches == sizes
    assert lines[0].split("  ")[0] == "task"
    assert lines[1].startswith("edit  3/4      75.0 %    30.1 to 95.4")
    assert "2.0 / 2 / 2" in lines[1]


def test_an_interrupted_run_resumes(run: Run, scholar: FakeEngine, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = (*EDIT, "--limit", "4", "--batch-size", "1", "--out", str(out), "--json")
    with monkeypatch.context() as patch:
        whole, interrupt = scholar.generate_batch, MagicMock(side_effect=KeyboardInterrupt)
        patch.setattr(scholar, "generate_batch", lambda p, **k: (interrupt if WRONG in p else whole)(p, **k))
        first = run(*args)
    assert (first.code, first.err, out.exists()) == (130, "redraft: error: interrupted\n", False)

    scholar.batches.clear()
    second = run(*args)
    assert second.err == "redraft: note: 2 items are done already and are not run again\n"
    assert scholar.batches == [1, 1]
    assert (second.json["reused_items"], second.json["tasks"]["edit"]["correct"]) == (2, 3)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["id"], r["correct"]) for r in rows] == [(f"edit/{i}", i != 2) for i in range(4)]
    assert [p.name for p in out.parent.iterdir()] == [out.name]

    third = run(*args)
    assert (third.code, third.err) == (2, f"redraft: error: {out} already exists; remove it or choose another file\n")


def test_results_of_another_run_are_not_mixed_in(run: Run, scholar: FakeEngine, out: Path) -> None:
    run(*EDIT, "--limit", "2", "--out", str(out))
    out.rename(f"{out}.part")
    for changed in (("--limit", "3"), ("--limit", "2", "--seed", "1"), ("--limit", "2", "--steps", "3")):
        outcome = run(*EDIT, "--out", str(out), *changed)
        assert outcome.code == 2
        assert "r.jsonl.part holds results of another model, seed, task or setting" in outcome.err
    assert run(*EDIT, "--limit", "2", "--batch-size", "1", "--out", str(out)).code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((*EDIT, "--limit", "1001"), "task edit has only 1000 held-out prompts, 1001 asked for"),
        ((*EDIT, "--out", "no/r.jsonl"), "no/r.jsonl: the directory no does not exist"),
        (("eval", "demo", "--task", "humaneval", "--data", "."), NO_FILE),
    ],
)
def test_refusals_come_before_loading(
    run: Run, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run(*args)
    assert (outcome.code, outcome.err, engine.prompts) == (2, f"redraft: error: {message}\n", [])


def test_a_benchmark_from_a_directory(run: Run, engine: FakeEngine, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": f"What is {n} plus {n}?", "answer": f"#### {2 * n}"} for n in (1, 2, 600)]
    (out.parent / "gsm8k_test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    monkeypatch.setattr(engine, "answer_to", lambda prompt: "\\boxed{1,200}" if "600" in prompt else "\\boxed{2}")
    outcome = run("eval", "demo", "--task", "gsm8k", "--data", str(out.parent), "--out", str(out), "--json")
    report = outcome.json["tasks"]["gsm8k"]
    assert (outcome.code, report["items"], report["correct"]) == (0, 3, 2)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["id"], r["expected"], r["correct"]) for r in records] == [
        ("gsm8k/0", "2", True), ("gsm8k/1", "4", False), ("gsm8k/2", "1200", True)
    ]  # fmt: skip
    assert records[0]["prompt"].startswith("What is 1 plus 1?\n\nReason step by step")


def test_everyday_counts_answers_that_end(run: Run, engine: FakeEngine) -> None:
    everyday = run("eval", "demo", "--task", "everyday", "--max-new-tokens", "60", "--json").json["tasks"]["everyday"]
    assert everyday["items"] >= 20
    assert engine.batches == [1] * everyday["items"]  # their time is the figure
    assert everyday["correct"] == everyday["items"] - everyday["cut_off"] > 0
    assert everyday["cut_off"] > 0
    assert set(everyday["answer_seconds"]) == {"mean", "p50", "p90"}
