"""Tickets: streams side by side, threads, growth, cancelling and failing."""

import gc
import re
import threading

import pytest
from fake_runner import CANVAS, FakeRunner
from test_loop import _answer, _Config, _request

from redraft.engine.events import Committed, Draft, Result
from redraft.engine.loop import Loop
from redraft.engine.tickets import Desk
from redraft.errors import RedraftError, UsageError


class _Text:
    def decode(self, ids):
        return "".join(chr(97 + token % 26) for token in ids)


class _Opened:
    """A desk and the loops that it opened."""

    def __init__(self, most: int = 8, memory: int = 99, **options: int):
        self.runners: list[FakeRunner] = []
        self.memory, self.options = memory, options
        self.desk = Desk(self._open, most, 60, _Text(), CANVAS)

    def _open(self, slots: int, positions: int) -> Loop:
        self.runners.append(FakeRunner(min(slots, self.memory), capacity=positions, **self.options))
        return Loop(self.runners[-1], _Config())


def test_two_streams_stepped_in_turn_each_get_their_own_answer():
    opened = _Opened()
    first, second = (opened.desk.submit([_request([5], seed=seed)])[0] for seed in (3, 4))
    streams, events = [iter(first), iter(second)], ([], [])
    for _ in range(7):
        for stream, own in zip(streams, events, strict=True):
            own.append(next(stream))
    for own, seed in zip(events, (3, 4), strict=True):
        assert [type(e) for e in own] == [Draft, Draft, Committed, Draft, Draft, Committed, Result]
        assert own[-1].token_ids == _answer(seed)
        assert "".join(e.text for e in own if isinstance(e, Committed)) == own[-1].text
    assert all(next(stream, None) is None for stream in streams)


def test_threads_share_one_loop():
    opened = _Opened(most=4)
    results: dict[int, list[int]] = {}

    def ask(seed: int) -> None:
        results[seed] = opened.desk.submit([_request([5], seed=seed, steps=1 + seed % 5)])[0].result().token_ids

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(2, 34)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {seed: _answer(seed) for seed in range(2, 34)}
    assert [r.slots for r in opened.runners] == sorted({r.slots for r in opened.runners})


def test_a_desk_grows_when_it_is_idle():
    opened = _Opened(most=4)
    opened.desk.submit([_request([5])])[0].result()
    running, longer = opened.desk.submit([_request([5])])[0], opened.desk.submit([_request([5] * 30)])[0]
    assert running.result().token_ids == longer.result().token_ids
    assert [t.result().token_ids for t in opened.desk.submit([_request([5], seed=s) for s in range(2, 11)])] == [
        _answer(s) for s in range(2, 11)
    ]
    assert [(r.slots, r.capacity) for r in opened.runners] == [(1, 9), (1, 38), (4, 38)]
    assert [r.closed for r in opened.runners] == [True, True, False]


def test_fewer_slots_where_memory_ends():
    opened = _Opened(most=8, memory=3)
    for _ in range(2):
        tickets = opened.desk.submit([_request([5], seed=s) for s in range(2, 10)])
        assert [t.result().token_ids for t in tickets] == [_answer(s) for s in range(2, 10)]
    assert [r.slots for r in opened.runners] == [3], "what memory allows is not tried again"
    planned = _Opened(most=8, memory=3)
    planned.desk.open(8, 20)
    planned.desk.submit([_request([5], seed=s) for s in range(2, 10)])[-1].result()
    assert [r.slots for r in planned.runners] == [3], "nor after a plan"


def test_cancelling():
    opened = _Opened()
    kept, gone = opened.desk.submit([_request([5], seed=3), _request([6], seed=4, steps=9)])
    next(iter(gone))
    gone.cancel()
    assert list(gone) == []
    with pytest.raises(RedraftError, match="the request was cancelled"):
        gone.result()
    assert kept.result().token_ids == _answer(3)
    kept.cancel()
    assert kept.result().token_ids == _answer(3), "an answer that is there stays"
    opened.desk.submit([_request([7])])[0].result()
    assert opened.runners[-1].requests == {}


def test_a_ticket_that_nobody_holds_frees_its_slot():
    opened = _Opened(most=1)
    opened.desk.submit([_request([5], steps=1000)])
    gc.collect()
    assert opened.desk.submit([_request([6], seed=4)])[0].result().token_ids == _answer(4)


@pytest.mark.parametrize(
    ("error", "others", "message", "closed"),
    [
        (RuntimeError("the device is gone"), RuntimeError, "the device is gone", True),
        (KeyboardInterrupt("^C"), RedraftError, "another request was interrupted", False),
    ],
)
def test_a_step_that_breaks_off_ends_every_request(error, others, message, closed):
    """What fails closes the runner and the next begins afresh; an interrupt leaves it as it is."""
    opened = _Opened()
    mine, other = opened.desk.submit([_request([5], seed=3), _request([6], seed=4)])
    runner = opened.runners[-1]
    original = runner.run_pass

    def broken(slots):
        runner.run_pass = original
        raise error

    runner.run_pass = broken
    with pytest.raises(type(error), match=re.escape(str(error))):
        mine.result()
    with pytest.raises(others, match=message):
        other.result()
    assert runner.closed == closed
    assert opened.desk.submit([_request([5], seed=3)])[0].result().token_ids == _answer(3)
    assert len(opened.runners) == 1 + closed and not opened.runners[-1].closed


def test_what_never_fits_leaves_the_others_alone():
    opened = _Opened()
    running = opened.desk.submit([_request([5], seed=3)])[0]
    with pytest.raises(UsageError, match="need 63 positions, a slot has 60"):
        opened.desk.submit([_request([5]), _request([5] * 55)])
    assert running.result().token_ids == _answer(3)
    assert opened.runners[0].requests == {}


def test_closing_ends_what_runs():
    opened = _Opened()
    ticket = opened.desk.submit([_request([5])])[0]
    opened.desk.close()
    assert opened.runners[0].closed
    with pytest.raises(RedraftError, match="the engine was closed"):
        ticket.result()
    assert opened.desk.submit([_request([5], seed=3)])[0].result().token_ids == _answer(3)
