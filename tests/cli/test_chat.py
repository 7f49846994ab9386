"""`redraft chat`: history, commands, and turns that fail without ending the chat."""

import json

from cli.conftest import Run
from cli.fake_engine import CONTEXT, FakeEngine


def turns(engine: FakeEngine) -> list[list[tuple[str, str]]]:
    return [[(message["role"], message["content"]) for message in prompt] for prompt in engine.prompts]


def test_the_conversation_grows(run: Run, engine: FakeEngine) -> None:
    outcome = run("chat", "demo", "--system", "S", stdin="one\n\ntwo\n/exit\nthree\n")
    assert outcome == (0, "You said: one\nYou said: two\n", "")
    first = [("system", "S"), ("user", "one")]
    assert turns(engine) == [first, [*first, ("assistant", "You said: one"), ("user", "two")]]


def test_reset_seed_and_help(run: Run, engine: FakeEngine) -> None:
    outcome = run("chat", "demo", "--json", stdin="a\n/reset\n/seed 5\n/help\nb\n")
    values = [json.loads(line) for line in outcome.out.splitlines()]
    assert [(v["text"], v["seed"]) for v in values] == [("You said: a", 0), ("You said: b", 5)]
    assert values[0]["model"] == "demo"
    assert turns(engine)[1] == [("user", "b")]
    assert outcome.err.startswith("/reset forgets")


def test_a_failed_turn_is_taken_back_and_the_chat_goes_on(run: Run, engine: FakeEngine) -> None:
    outcome = run("chat", "demo", stdin=f"one\n{'x' * CONTEXT}\ntwo\n")
    failure = f"the prompt exceeds the context of {CONTEXT}; or /reset forgets the turns before"
    assert outcome == (2, "You said: one\nYou said: two\n", f"redraft: error: {failure}\n")
    assert turns(engine)[1] == [("user", "one"), ("assistant", "You said: one"), ("user", "two")]


def test_bad_commands_and_lines_are_named(run: Run, engine: FakeEngine) -> None:
    outcome = run("chat", "demo", stdin="/seed many\n/quiet\nx\n")
    first, second = outcome.err.splitlines()
    assert first == "redraft: error: seed is 'many', expected a whole number from 0 to 2^63 - 1"
    assert second.startswith("redraft: error: unknown command /quiet; /reset forgets")
    assert outcome.out == "You said: x\n"
    no_text = "redraft: error: that line is not text in the terminal's encoding\n"
    assert run("chat", "demo", stdin=b"a\xff\n") == (2, "", no_text)


def test_ctrl_c_on_a_pipe_ends_the_program(run: Run, engine: FakeEngine) -> None:
    engine.failure = KeyboardInterrupt()
    assert run("chat", "demo", stdin="one\ntwo\n") == (130, "", "redraft: error: interrupted\n")
