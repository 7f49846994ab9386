"""The live view, frame by frame, as a terminal of a given size would show it."""

from __future__ import annotations

import io
import time

import pytest
from cli.fake_engine import EOS, FakeEngine
from rich.console import Console

from redraft.cli.live import DraftView, printable, show_live
from redraft.engine.events import Committed, Draft

ENGINE = FakeEngine()


def terminal(width: int = 40, height: int = 10, **options: object) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, height=height, _environ={"TERM": "xterm"}, **options
    )  # type: ignore[arg-type]


def frame(view: DraftView, console: Console) -> list[str]:
    """The lines of one frame, escape codes included."""
    with console.capture() as capture:
        console.print(view)
    return capture.get().splitlines()


def new_view() -> DraftView:
    return DraftView(ENGINE.decode, (EOS,))


def draft(text: str, accepted: str, step: int = 1, canvas: int = 0) -> Draft:
    return Draft(canvas, step, [*map(ord, text)], [c == "x" for c in accepted], 0.25)


def test_positions_settle_from_dim_over_bold_to_normal() -> None:
    view, console = new_view(), terminal(60)
    view.update(draft("cat!", "x..."))
    assert frame(view, console) == [
        "\x1b[1mc\x1b[0m\x1b[2mat!\x1b[0m",
        "\x1b[2mcanvas 1 · pass 1 · accepted 1/4 · entropy 0.250\x1b[0m",
    ]
    view.update(draft("cat!", "xx.x", step=2))
    assert frame(view, console)[0] == "c\x1b[1ma\x1b[0m\x1b[2mt\x1b[0m\x1b[1m!\x1b[0m"
    view.update(draft("cat!", ".x..", step=3))  # acceptance is decided afresh: what was accepted may open again
    assert frame(view, console)[0] == "\x1b[2mc\x1b[0ma\x1b[2mt!\x1b[0m"


def test_a_new_canvas_starts_open_behind_the_committed_text() -> None:
    view, console = new_view(), terminal(60)
    view.update(draft("ab", "xx"))
    view.update(Committed(0, 1, [*map(ord, "ab")], text="ab"))
    view.update(draft("cd", "xx", canvas=1))
    assert frame(view, console) == [
        "ab\x1b[1mcd\x1b[0m",
        "\x1b[2mcanvas 2 · pass 1 · accepted 2/2 · entropy 0.250\x1b[0m",
    ]


def test_nothing_is_shown_after_an_accepted_end_and_an_open_end_is_no_end() -> None:
    view, console = new_view(), terminal()
    view.update(Draft(0, 1, [ord("a"), EOS, 0, 0, ord("z")], [True] * 5, 0.0))
    assert frame(view, console)[0] == "\x1b[1ma\x1b[0m"
    view.update(Draft(1, 1, [ord("a"), EOS, 0, ord("z")], [True, False, False, True], 0.0))
    assert frame(view, console)[0] == "\x1b[1ma\x1b[0m\x1b[1mz\x1b[0m"


def test_random_tokens_cannot_steer_the_terminal() -> None:
    view, console = new_view(), terminal()
    view.update(draft("a\x1b[2J\x07\x9b\u202eb\nc", "." * 11))
    assert frame(view, console)[0] == "\x1b[2ma[2Jb c\x1b[0m"
    view.update(draft("a\nc", "xxx", canvas=1))  # accepted newlines count
    assert frame(view, console)[:2] == ["\x1b[1ma\x1b[0m", "\x1b[1mc\x1b[0m"]


def test_printable_keeps_text_and_marks_broken_characters() -> None:
    assert printable("tab\t, new\nline, é, 漢\r\n\ufffd\x00\x1b") == "tab\t, new\nline, é, 漢\n·"


@pytest.mark.parametrize("width", [1, 5, 12])
def test_a_narrow_terminal_wraps_the_text_and_cuts_the_figures(width: int) -> None:
    view = new_view()
    view.update(draft("0123456789", "xxxxxxxxxx"))
    lines = frame(view, Console(file=io.StringIO(), width=width, height=20, soft_wrap=True))
    assert "".join(lines[:-1]) == "0123456789"
    assert all(len(line) <= width for line in lines)
    assert lines[-1] == {1: "…", 5: "canv…", 12: "canvas 1 · …"}[width]


def test_only_the_tail_that_fits_the_height_is_drawn() -> None:
    view = new_view()
    view.update(Committed(0, 1, [], text="one\ntwo\nthree\nfour\n"))
    view.update(draft("five", "xxxx", canvas=1))
    lines = frame(view, Console(file=io.StringIO(), width=60, height=5))
    assert lines == ["three", "four", "five", "canvas 2 · pass 1 · accepted 4/4 · entropy 0.250"]


def test_show_live_returns_the_result_and_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redraft.cli.live.FRAME_SECONDS", 0.0)
    console = terminal(60)
    result = show_live(ENGINE.stream("a long question indeed"), new_view(), console)
    assert result.text == "You said: a long question indeed"
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[2m????????????????\x1b[0m" in drawn
    assert "\x1b[1mYou said: a long\x1b[0m" in drawn
    assert "You said: a long\x1b[1m question indeed\x1b[0m" in drawn
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("question")  # the cursor is back
    assert drawn.endswith("\x1b[1A\x1b[2K")  # and the last line is wiped


def test_watching_slowly_does_not_slow_the_figures() -> None:
    began = time.perf_counter()
    result = show_live(ENGINE.stream("hi"), new_view(), terminal(), pace=0.2)
    assert time.perf_counter() - began >= 0.4  # two drafts
    assert result.seconds == pytest.approx(0.5, abs=0.02)
    assert result.tokens_per_second == len(result.token_ids) / result.seconds


def test_the_cursor_comes_back_after_ctrl_c() -> None:
    console = terminal()
    failing = FakeEngine(failure=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        show_live(failing.stream("x"), new_view(), console)
    assert "\x1b[?25h" in console.file.getvalue()  # type: ignore[attr-defined]
