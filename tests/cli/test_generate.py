"""`redraft generate`: the answer alone into a pipe, one JSON line, the prompt from everywhere."""

import pytest
from cli.conftest import Run
from cli.fake_engine import FakeEngine

import redraft


def test_a_pipe_gets_the_answer_and_nothing_else(run: Run, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run("generate", "demo", "hello") == (0, "You said: hello\n", "")


def test_json_is_the_last_line_and_says_what_ran(run: Run, engine: FakeEngine) -> None:
    outcome = run("generate", "some/model", "hé", "--seed", "7", "--json")
    assert outcome.json == {
        "text": "You said: hé", "token_ids": [*map(ord, "You said: hé"), 1], "tokens": 13, "prompt_tokens": 7,
        "cached_tokens": 0, "forwards": 2, "canvases": 1, "tokens_per_forward": 6.5, "steps_per_canvas": [2],
        "seconds": pytest.approx(0.5, rel=0.1), "tokens_per_second": pytest.approx(26.0, rel=0.1),
        "finish_reason": "stop", "seed": 7, "peak_memory_bytes": 1000,
        "model": "some/model", "weights": "w4", "tier": "turbo", "device": "cpu", "dtype": "float32",
        "weight_bytes": 1_500_000,
    }  # fmt: skip


@pytest.mark.parametrize("args", [("-",), ()])
def test_prompt_from_stdin_loses_the_newline_of_echo(run: Run, engine: FakeEngine, args: tuple[str, ...]) -> None:
    assert run("generate", "demo", *args, stdin="two\nlines\n").out == "You said: two\nlines\n"


def test_bad_prompts_exit_2(run: Run, engine: FakeEngine) -> None:
    assert run("generate", "demo", stdin="") == (2, "", "redraft: error: the prompt is empty\n")
    no_text = "redraft: error: the prompt on stdin is not text in utf-8 (byte 1)\n"
    assert run("generate", "demo", "-", stdin=b"a\xff") == (2, "", no_text)
    assert run("generate", "demo", "a\udcff") == (2, "", "redraft: error: the prompt is not valid Unicode text\n")


def test_options_reach_the_engine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, loaded = FakeEngine(), {}
    monkeypatch.setattr(redraft, "load", lambda model, **options: loaded.update(model=model, **options) or fake)
    calls = []
    monkeypatch.setattr(fake, "generate", lambda p, **k: calls.append((p, k)) or FakeEngine.generate(fake, p))
    run(
        "generate", "m", "hi", "--system", "Be brief.", "--seed", "3", "--max-new-tokens", "9", "--steps", "4",
        "--entropy-bound", "0.5", "--weights", "bf16", "--tier", "off", "--device", "cpu",
    )  # fmt: skip
    assert loaded == {"model": "m", "weights": "bf16", "tier": "off", "device": "cpu"}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert calls == [(messages, {"seed": 3, "max_new_tokens": 9, "max_denoising_steps": 4, "entropy_bound": 0.5})]


def test_notes_of_the_checkpoint_go_to_stderr(run: Run, engine: FakeEngine) -> None:
    engine.notes.append("vision tensors are left out")
    outcome = run("generate", "demo", "x")
    assert (outcome.out, outcome.err) == ("You said: x\n", "redraft: note: vision tensors are left out\n")
