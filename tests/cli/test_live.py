"""The live view, frame by frame, as a terminal of a given size would show it."""

import io
import time

import pytest
from cli.fake_engine import EOS, FakeEngine
from rich.console import Console

from redraft.cli.live import DraftView, printable, show_live
from redraft.engine.events import Committed, Draft

ENGINE = FakeEngine()


def terminal(width: int = 60, height: int = 10) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, _environ={"TERM": "xterm"})


def frame(view: DraftView, console: Console) -> list[str]:
    """The lines of one frame, escape codes included."""
    with console.capture() as capture:
        console.print(view)
    return capture.get().splitlines()


def view_of(*events: Draft | Committed) -> DraftView:
    view = DraftView(ENGINE.decode, (EOS,))
    for event in events:
        view.update(event)
    return view


def draft(text: str, accepted: str, step: int = 1, canvas: int = 0) -> Draft:
    return Draft(canvas, step, [*map(ord, text)], [c == "x" for c in accepted], 0.25)


def bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m"


def dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m"


END = chr(EOS)


@pytest.mark.parametrize(
    "steps",
    [
        [  # positions settle from dim over bold to normal; acceptance is decided afresh: one may open again
            (draft("cat!", "x..."), bold("c") + dim("at!"), "canvas 1 · pass 1 · accepted 1/4"),
            (draft("cat!", "xx.x", 2), "c" + bold("a") + dim("t") + bold("!"), "canvas 1 · pass 2 · accepted 3/4"),
            (draft("cat!", ".x..", 3), dim("c") + "a" + dim("t!"), "canvas 1 · pass 3 · accepted 1/4"),
        ],
        [  # a new canvas starts open behind the committed text
            (draft("ab", "xx"), bold("ab"), "canvas 1 · pass 1 · accepted 2/2"),
            (Committed(0, 1, [*map(ord, "ab")], text="ab"), "ab", "reading ..."),
            (draft("cd", "xx", canvas=1), "ab" + bold("cd"), "canvas 2 · pass 1 · accepted 2/2"),
        ],
        [  # nothing is shown after an accepted end, and an open end is no end
            (draft(f"a{END}\0\0z", "xxxxx"), bold("a"), "canvas 1 · pass 1 · accepted 5/5"),
            (draft(f"a{END}\0z", "x..x", canvas=1), bold("a") + bold("z"), "canvas 2 · pass 1 · accepted 2/4"),
        ],
        [  # random tokens cannot steer the terminal; accepted newlines count
            (draft("a\x1b[2J\x07\x9b\u202eb\nc", "." * 11), dim("a[2Jb c"), "canvas 1 · pass 1 · accepted 0/11"),
            (draft("a\nc", "xxx", canvas=1), bold("a") + "\n" + bold("c"), "canvas 2 · pass 1 · accepted 3/3"),
        ],
    ],
    ids=["settling", "canvases", "end", "controls"],
)
def test_frames(steps: list[tuple[Draft | Committed, str, str]]) -> None:
    view, console = view_of(), terminal()
    for event, text, figures in steps:
        view.update(event)
        entropy = " · entropy 0.250" if isinstance(event, Draft) else ""
        assert frame(view, console) == [*text.split("\n"), dim(figures + entropy)]


def test_printable_keeps_text_and_marks_broken_characters() -> None:
    assert printable("tab\t, new\nline, é, 漢\r\n\ufffd\x00\x1b") == "tab\t, new\nline, é, 漢\n·"


@pytest.mark.parametrize("width", [1, 5, 12])
def test_a_narrow_terminal_wraps_the_text_and_cuts_the_figures(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, height=20, soft_wrap=True)
    lines = frame(view_of(draft("0123456789", "xxxxxxxxxx")), console)
    assert "".join(lines[:-1]) == "0123456789"
    assert all(len(line) <= width for line in lines)
    assert lines[-1] == {1: "…", 5: "canv…", 12: "canvas 1 · …"}[width]


def test_only_the_tail_that_fits_the_height_is_drawn() -> None:
    view = view_of(Committed(0, 1, [], text="one\ntwo\nthree\nfour\n"), draft("five", "xxxx", canvas=1))
    lines = frame(view, Console(file=io.StringIO(), width=60, height=5))
    assert lines == ["three", "four", "five", "canvas 2 · pass 1 · accepted 4/4 · entropy 0.250"]


def test_show_live_returns_the_result_and_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redraft.cli.live.FRAME_SECONDS", 0.0)
    console = terminal()
    result = show_live(ENGINE.stream("a long question indeed"), view_of(), console)
    assert result.text == "You said: a long question indeed"
    drawn = console.file.getvalue()
    assert dim("????????????????") in drawn
    assert bold("You said: a long") in drawn
    assert "You said: a long" + bold(" question indeed") in drawn
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("question")  # the cursor is back
    assert drawn.endswith("\x1b[1A\x1b[2K")  # and the last line is wiped


def test_watching_slowly_does_not_slow_the_figures() -> None:
    began = time.perf_counter()
    result = show_live(ENGINE.stream("hi"), view_of(), terminal(), pace=0.2)
    assert time.perf_counter() - began >= 0.4  # two drafts
    assert result.seconds == pytest.approx(0.5, abs=0.02)
    assert result.tokens_per_second == len(result.token_ids) / result.seconds


def test_the_cursor_comes_back_after_ctrl_c() -> None:
    console = terminal()
    with pytest.raises(KeyboardInterrupt):
        show_live(FakeEngine(failure=KeyboardInterrupt()).stream("x"), view_of(), console)
    assert "\x1b[?25h" in console.file.getvalue()
