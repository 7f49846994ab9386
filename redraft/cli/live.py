"""The canvas while it is being rewritten: what the engine accepts settles, the rest stays dim and changes.

A frame is the tail of the text that fits the terminal and a line of figures. Nothing relies on colour: positions
accepted for the first time are bold, accepted ones normal, open ones dim.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Collection, Iterable
from itertools import groupby, takewhile

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from redraft.engine.events import Committed, Draft, Event, Result

FRAME_SECONDS = 0.04  # passes of a GPU come faster than a terminal or an eye can follow

# Controls but tab and newline, and marks that reorder text: a draft holds random tokens, and a terminal obeys them.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text without characters that steer a terminal; halves of a multi-byte character become a dot."""
    return _CONTROLS.sub("", text.replace("\r\n", "\n")).replace("\ufffd", "·")


class DraftView:
    """A rich renderable of one answer in the making. Feed it the events of `engine.stream`.

    decode: token ids to text without special tokens. end_tokens: ids after which a canvas holds nothing but padding.
    """

    def __init__(self, decode: Callable[[list[int]], str], end_tokens: Collection[int]) -> None:
        self._decode = decode
        self._end_tokens = end_tokens
        self._committed = ""
        self._draft: Draft | None = None
        self._before: list[bool] = []  # positions accepted in the pass before

    def update(self, event: Draft | Committed) -> None:
        """Show one pass over the current canvas; put a finished canvas behind the text and forget its draft."""
        if isinstance(event, Committed):
            self._committed += printable(event.text)
            self._draft = None
            return
        same_canvas = self._draft is not None and self._draft.canvas == event.canvas
        self._before = self._draft.accepted if same_canvas and self._draft else [False] * len(event.accepted)
        self._draft = event

    def text(self) -> Text:
        """Committed text and the canvas, each position in the style of its state."""
        text = Text(self._committed)
        if self._draft is None:
            return text
        states = zip(self._draft.tokens, self._draft.accepted, self._before, strict=True)
        shown = takewhile(lambda state: not (state[1] and state[0] in self._end_tokens), states)
        for style, run in groupby(shown, key=lambda state: _style(*state[1:])):
            piece = printable(self._decode([token for token, _, _ in run]))
            # A random newline would make the whole frame jump up and down.
            text.append(piece.replace("\n", " ") if style == "dim" else piece, style)
        return text

    def _status(self) -> str:
        if (d := self._draft) is None:
            return "reading ..."
        return (
            f"canvas {d.canvas + 1} · pass {d.step} · accepted {sum(d.accepted)}/{len(d.accepted)}"
            f" · entropy {d.mean_entropy:.3f}"
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wrapped = options.reset_height().update(no_wrap=False, overflow="fold")  # also where lines of text are not
        lines = console.render_lines(self.text(), wrapped, pad=False)
        room = max(1, console.size.height - 2)  # one line of figures, one for the cursor
        for line in lines[-room:]:
            yield from line
            yield Segment.line()
        yield Text(self._status(), style="dim", no_wrap=True, overflow="ellipsis")


def _style(accepted: bool, before: bool) -> str:
    return ("" if before else "bold") if accepted else "dim"


def show_live(events: Iterable[Event], view: DraftView, console: Console, pace: float = 0.0) -> Result:
    """Draw the events as they come, wipe the drawing and return the result, the last of them.

    pace: seconds that each draft stays at least. Time spent here is taken out of the result's figures.
    """
    drawn = held = 0.0
    # No refresh thread: a frame is drawn between two passes, and Ctrl-C finds the terminal in order.
    with Live(view, console=console, auto_refresh=False, transient=True) as live:
        for event in events:
            began = time.perf_counter()
            if isinstance(event, Result):
                # The engine waits while a draft is drawn, and that is not its speed.
                return dataclasses.replace(event, seconds=event.seconds - held)
            view.update(event)
            if began - drawn >= FRAME_SECONDS:
                live.refresh()
                drawn = began
            if isinstance(event, Draft):
                time.sleep(pace)
            held += time.perf_counter() - began
    raise RuntimeError("the engine's stream ended without a result")
