"""Callers of a loop, in any number of threads: each waits for its own events, and whoever waits steps for all."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakValueDictionary

from redraft.engine.events import Event, Result
from redraft.engine.loop import Loop, Request
from redraft.engine.text import Speech, Text
from redraft.errors import RedraftError

OpenLoop = Callable[[int, int], Loop]  # of so many slots, or fewer where memory ends, of so many positions


class Ticket:
    """A request that was submitted: iterate for its events, the Result last.

    A ticket that nobody holds any more is cancelled.
    """

    def __init__(self, desk: Desk, request: Request, speech: Speech | None):
        self._desk, self._speech, self.request = desk, speech, request
        self._events: deque[Event] = deque()
        self._failure: BaseException | None = None
        self._over = False
        self._result: Result | None = None

    def __iter__(self) -> Iterator[Event]:
        """Events from where the last iteration stopped: a Draft per pass if asked for, a Committed per canvas, Result.

        Raises what made the request fail.
        """
        while (event := self._desk.next_event(self)) is not None:
            yield event

    def cancel(self) -> None:
        """Give the request up, at whatever pass it is. Events that were not read are gone.

        Never waits: it may be called by a finaliser, in the middle of a step.
        """
        self._end(None)

    def result(self) -> Result:
        """Wait for the answer. Raises what made the request fail, RedraftError when it was cancelled."""
        for _ in self:
            pass
        if self._result is None:
            raise RedraftError("the request was cancelled")
        return self._result

    def _take(self, event: Event) -> None:
        if self._speech is not None:
            event = self._speech.add(event)
        self._events.append(event)
        if isinstance(event, Result):
            self._result, self._over = event, True

    def _end(self, failure: BaseException | None) -> None:
        self._failure, self._over = failure, True
        self._events.clear()


class Desk:
    """One loop and the tickets of its requests.

    The loop is opened for the first requests, and whenever it is idle and too small opened anew with more slots and
    longer ones, up to `most_slots` of `most_positions`. Without `text` events have token ids only.
    """

    def __init__(
        self, open_loop: OpenLoop, most_slots: int, most_positions: int, text: Text | None, canvas_length: int
    ):
        self._open, self._most_slots, self._most_positions = open_loop, most_slots, most_positions
        self._text, self._canvas_length = text, canvas_length
        self._turn = threading.Condition()
        self._stepping = False
        self._loop: Loop | None = None
        self._queue: deque[Ticket] = deque()  # not yet in the loop
        self._tickets: WeakValueDictionary[int, Ticket] = WeakValueDictionary()

    def open(self, slots: int, positions: int) -> None:
        """Open the loop now, before any request."""
        with self._alone():
            self._open_anew(slots, positions)

    def submit(self, requests: Sequence[Request]) -> list[Ticket]:
        """Put requests in line. Raises UsageError or MemoryShortage when one can never run; then none does."""
        for request in requests:
            request.check_fits(self._most_positions, self._canvas_length)
        tickets = [Ticket(self, request, Speech(self._text) if self._text else None) for request in requests]
        with self._alone():
            self._queue.extend(tickets)
            try:
                self._fill()
            except BaseException:
                for ticket in tickets:
                    ticket.cancel()
                self._drop_cancelled()
                raise
        return tickets

    def next_event(self, ticket: Ticket) -> Event | None:
        """The ticket's next event, None when there are no more. Steps the loop, or waits for who is stepping it."""
        while True:
            with self._turn:
                while self._stepping and not ticket._events and not ticket._over:
                    self._turn.wait()
                if ticket._events:
                    return ticket._events.popleft()
                if ticket._failure is not None:
                    raise ticket._failure
                if ticket._over:
                    return None
                self._stepping = True
            try:
                self._step()
            finally:
                with self._turn:
                    self._stepping = False
                    self._turn.notify_all()

    def forget(self) -> None:
        """Give up what slots hold of earlier requests, unless some are running."""
        with self._alone():
            self._drop_cancelled()
            if self._loop is not None and not self._tickets:
                self._loop.reset()

    def close(self) -> None:
        """Cancel everything and give the loop's memory back; the next request opens another."""
        with self._alone():
            self._abandon(RedraftError("the engine was closed"))
            self._close_loop()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the turn while no step is running."""
        with self._turn:
            while self._stepping:
                self._turn.wait()
            try:
                yield
            finally:
                self._turn.notify_all()

    def _step(self) -> None:
        """One step of the loop; runs while `_stepping` keeps everybody else out."""
        try:
            self._drop_cancelled()
            self._fill()
            if self._loop is not None:
                for number, event in self._loop.step():
                    ticket = self._tickets.get(number)
                    if ticket is None:
                        self._loop.cancel(number)
                    elif not ticket._over:
                        ticket._take(event)
                    if isinstance(event, Result):
                        self._tickets.pop(number, None)
        except Exception as e:
            self._abandon(e)
            self._close_loop()
            raise
        except BaseException:
            self._abandon(RedraftError("another request was interrupted"))
            if self._loop is not None:
                self._loop.reset()
            raise

    def _fill(self) -> None:
        """Move requests from the queue into the loop, which is opened anew if it is idle and too small."""
        if not self._queue:
            return
        if self._loop is None or self._loop.idle:
            self._grow()
        assert self._loop is not None
        while self._queue:
            busy = not self._loop.idle
            if busy and self._loop.live >= self._loop.runner.slots < self._most_slots:
                return  # once those ahead are answered, there will be more slots
            request = self._queue[0].request
            if busy and request.positions(self._canvas_length) > self._loop.runner.capacity:
                return  # likewise, and longer ones
            self._tickets[self._loop.add(request)] = self._queue.popleft()

    def _grow(self) -> None:
        """Open a loop that holds what is queued, unless the present one does."""
        slots = min(len(self._queue), self._most_slots)
        positions = max(ticket.request.positions(self._canvas_length) for ticket in self._queue)
        if self._loop is not None:
            runner = self._loop.runner
            if runner.slots >= slots and runner.capacity >= positions:
                return
            slots, positions = max(slots, runner.slots), max(positions, runner.capacity)
        self._open_anew(slots, positions)

    def _open_anew(self, slots: int, positions: int) -> None:
        self._close_loop()  # its memory is free before the next one is planned
        self._loop = self._open(slots, positions)
        if self._loop.runner.slots < slots:
            self._most_slots = self._loop.runner.slots  # more are not tried again

    def _drop_cancelled(self) -> None:
        self._queue = deque(ticket for ticket in self._queue if not ticket._over)
        for number in [number for number, ticket in self._tickets.items() if ticket._over]:
            if self._loop is not None:
                self._loop.cancel(number)
            del self._tickets[number]

    def _abandon(self, failure: Exception) -> None:
        for ticket in [*self._queue, *self._tickets.values()]:
            if not ticket._over:
                ticket._end(failure)
        self._queue.clear()
        self._tickets.clear()

    def _close_loop(self) -> None:
        if self._loop is not None:
            self._loop.runner.close()
            self._loop = None
