"""compare-ar from the command line, on a CPU."""

from pathlib import Path

import pytest
import torch
from cli.conftest import Run

from redraft.bench.compare_ar import AUTOREGRESSIVE, OWN_STOP, Comparison

QUICK = ("--device", "cpu", "--fixed-passes", "2", "--sizes")


def test_command(run: Run, limits: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "scaling.png"
    outcome = run("compare-ar", "demo", *QUICK, "1,2", "--task", "demo:facts", "--json", "--plot", str(plot))
    assert outcome.code == 0, outcome.err
    assert "2 diffusion, own stop" in outcome.out and "% of bandwidth" in outcome.out
    assert "trained to predict the next token" in outcome.out and "do not speak for a GPU" in outcome.out
    report = outcome.json
    assert [row["batch"] for row in report["batches"]] == [1, 2] and report["prompts"] == 2
    for row in report["batches"]:
        assert set(row["arms"]) == {AUTOREGRESSIVE, "diffusion, 2 passes", OWN_STOP}
        assert row["arms"][AUTOREGRESSIVE]["right"] == row["arms"][OWN_STOP]["right"] == 2
        assert row["prompt_ms"] > 0
    assert report["probe"]["device"] == "test cpu" and report["task"] == "demo:facts"
    assert plot.stat().st_size > 10_000


def test_command_on_random_weights(run: Run, limits: None) -> None:
    args = ("--prompt-tokens", "6", "--max-new-tokens", "4", "--json")
    outcome = run("compare-ar", "random:tiny", *QUICK, "2", *args)
    assert outcome.code == 0, outcome.err
    assert "only speed means something" in outcome.out and "every answer has 4 tokens" in outcome.out
    report = outcome.json
    assert report["prompt_tokens"] == [6, 6] and report["task"] is None
    arm = report["batches"][0]["arms"][OWN_STOP]
    assert "right" not in arm and arm["tokens_per_answer"] == pytest.approx(4, abs=0.5)


def test_nothing_fits(run: Run, limits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Comparison, "_decoder", fail)
    outcome = run("compare-ar", "random:tiny", *QUICK, "1")
    assert outcome.code == 1
    assert outcome.error == "redraft: error: nothing was measured: out of memory"
