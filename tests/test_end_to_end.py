"""The README's promises on the bundled model, through the command line as a user runs it."""

import json
import subprocess
import sys

import pytest


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "redraft", *args], capture_output=True, text=True, timeout=240)


def _json(*args: str) -> dict:
    done = _run(*args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_demo_answers_three_prompts_and_shows_the_sizes():
    done = _run("demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("=> correct") == 3
    report = _json("demo")
    assert [a["correct"] for a in report["answers"]] == [True] * 3
    experts = report["sizes"]["experts"]
    # 4 bits plus an fp16 scale and zero point per 128 (two thirds of the weights) or 64 weights, against 16 bits.
    assert experts["bf16"] / experts["w4"] == pytest.approx(16 / (4 + 32 / 128 * 2 / 3 + 32 / 64 / 3), rel=1e-3)
    assert report["sizes"]["model"]["w4"] < report["sizes"]["model"]["bf16"]


def test_the_same_seed_gives_the_same_tokens():
    first, second = (_json("generate", "demo", "Tell a story about a fox named Mia.", "--seed", "1") for _ in range(2))
    assert first["token_ids"] == second["token_ids"]
    assert first["text"].endswith(".")
    assert first["weights"] == "w4"


def test_packing_to_disk_equals_packing_at_load(tmp_path):
    report = _json("quantize", "demo", str(tmp_path / "packed"))
    assert report["bytes_after"] < report["bytes_before"]
    prompt = ("What is the capital of France?", "--seed", "3")
    packed, loaded = _json("generate", str(tmp_path / "packed"), *prompt), _json("generate", "demo", *prompt)
    assert packed["token_ids"] == loaded["token_ids"]
    assert "Paris" in packed["text"]


def test_eval_reports_the_table_row(tmp_path):
    out = tmp_path / "items.jsonl"
    report = _json("eval", "demo", "--task", "demo:facts", "--limit", "8", "--weights", "w4", "--out", str(out))
    assert report["tasks"]["facts"]["accuracy"] == 1.0
    assert len(out.read_text().splitlines()) == 8
