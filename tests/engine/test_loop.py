"""The loop over a runner without a network: joining, leaving, pieces, stale statuses, prefixes that are kept."""

import pytest
from fake_runner import CANVAS, FakeRunner

from redraft.config import DecodeSettings, ModelConfig
from redraft.decode.entropy_bound import ENTROPY_BOUND
from redraft.engine.events import Committed, Draft, Result
from redraft.engine.loop import Loop, Request
from redraft.errors import UsageError


class _Config:
    canvas_length, pad_token_id = CANVAS, 0


def _loop(slots: int, **options: int) -> Loop:
    config: ModelConfig = _Config()  # type: ignore[assignment]
    return Loop(FakeRunner(slots, **options), config)


def _request(prompt: list[int], seed: int = 7, steps: int = 2, drafts: bool = True, room: int = 12) -> Request:
    settings = DecodeSettings(max_new_tokens=room, max_denoising_steps=steps, eos_token_ids=(1,))
    return Request(prompt, ENTROPY_BOUND, settings, seed, drafts)


def finish(loop: Loop) -> dict[int, list]:
    events: dict[int, list] = {}
    for _ in range(200):
        for number, event in loop.step():
            events.setdefault(number, []).append(event)
        if loop.idle:
            return events
    raise AssertionError("the loop does not come to an end")


def _ask(loop: Loop, prompt: list[int], **options: int) -> Result:
    """The answer to a request that is alone in the loop."""
    number = loop.add(_request(prompt, **options))
    return finish(loop)[number][-1]


def _answer(seed: int, canvases: int = 2) -> list[int]:
    return [t for c in range(canvases - 1) for t in (seed, seed + c, c, 50)] + [1]


def test_one_request_from_prompt_to_answer():
    loop = _loop(2)
    number = loop.add(_request([5, 6, 7]))
    *others, result = finish(loop)[number]
    drafts, committed = [e for e in others if isinstance(e, Draft)], [e for e in others if isinstance(e, Committed)]
    assert [(d.canvas, d.step) for d in drafts] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert [(c.canvas, c.steps, c.tokens, c.finish_reason) for c in committed] == [
        (0, 2, [7, 7, 0, 50], None),
        (1, 2, [1], "stop"),
    ]
    assert isinstance(result, Result) and result.token_ids == _answer(7) and result.tokens == 4, "one token is padding"
    assert (result.steps_per_canvas, result.finish_reason, result.prompt_tokens) == ([2, 2], "stop", 3)
    assert loop.runner.committed[0] == [5, 6, 7, 7, 7, 0, 50], "the last canvas is not committed"


def test_requests_join_and_leave_andfinish_in_any_order():
    loop = _loop(2)
    slow, fast = loop.add(_request([5], seed=3, steps=9)), loop.add(_request([6], seed=4, steps=2))
    late = loop.add(_request([8], seed=5, steps=1, drafts=False))
    order, events = [], {}
    while not loop.idle:
        for number, event in loop.step():
            events.setdefault(number, []).append(event)
            if isinstance(event, Result):
                order.append(number)
    assert order == [fast, late, slow]
    assert {n: e[-1].token_ids for n, e in events.items()} == {slow: _answer(3), fast: _answer(4), late: _answer(5)}
    assert not any(isinstance(event, Draft) for event in events[late])
    assert max(map(len, loop.runner.passes)) == 2 and [0] in loop.runner.passes
    assert events[slow][-1].seconds > events[fast][-1].seconds


def test_a_stale_status_is_never_taken_for_the_next_owner():
    """A pass that was on its way when its slot changed hands reports the same slot, canvas 0 and step 1."""
    loop = _loop(1, canvases=1)
    first, second = loop.add(_request([5], seed=3, steps=1)), loop.add(_request([6], seed=4, steps=1))
    events = finish(loop)
    assert [len(events[n]) for n in (first, second)] == [3, 3], "a draft, a canvas and a result each"
    assert len(loop.runner.passes) > 2, "passes were launched in vain, which is what the test is about"


def test_a_long_prompt_is_read_a_piece_a_step():
    loop = _loop(3)
    running = loop.add(_request([5], steps=30))
    loop.step()
    long, short = loop.add(_request(list(range(30)))), loop.add(_request([6, 7]))
    loop.runner.reads.clear()
    before = len(loop.runner.passes)
    for _ in range(4):
        loop.step()
    assert loop.runner.reads == [{2: 2}, {1: 8}, {1: 8}, {1: 8}, {2: 4}, {1: 6}], (
        "what is short does not wait for what is long"
    )
    assert len(loop.runner.passes) == before + 4, "neither what is short nor who is running waits for what is long"
    events = finish(loop)
    assert all(isinstance(events[n][-1], Result) for n in (running, long, short))


def test_commits_and_short_prompts_share_a_read():
    loop = _loop(4)
    for seed in range(2, 6):
        loop.add(_request([5, seed], seed=seed))
    finish(loop)
    assert loop.runner.reads == [{0: 2, 1: 2, 2: 2, 3: 2}, {0: 4, 1: 4, 2: 4, 3: 4}]


@pytest.mark.parametrize("steps", range(1, 9))
def test_a_request_is_cancelled_at_any_pass_and_in_line(steps: int):
    loop = _loop(2)
    gone, stays, waiting, never = (loop.add(_request([2 + seed], seed=seed, steps=3)) for seed in range(3, 7))
    for _ in range(steps - 1):
        loop.step()
    for number in (gone, never, 99):
        loop.cancel(number)
    events = finish(loop)
    assert gone not in events or steps > 8
    assert events[stays][-1].token_ids == _answer(4) and events[waiting][-1].token_ids == _answer(5)
    assert never not in events
    assert loop.runner.requests == {}


def test_a_conversation_goes_on_in_its_slot():
    loop = _loop(2)
    result = _ask(loop, [5, 6, 7])
    assert result.cached_tokens == 0
    turn = [5, 6, 7, *result.token_ids, 8, 9]
    other, second = loop.add(_request([5, 6])), loop.add(_request(turn, seed=9))
    loop.runner.reads.clear()
    events = finish(loop)
    cached = 3 + CANVAS  # the last canvas was never committed
    assert events[second][-1].cached_tokens == cached and events[other][-1].cached_tokens == 0
    assert loop.runner.reads[0] == {1: 2, 0: len(turn) - cached}
    assert loop.runner.committed[0][: len(turn)] == turn
    assert events[second][-1].prompt_tokens == len(turn)


def test_the_same_prompt_again_reads_nothing():
    loop = _loop(1, canvases=1)
    assert [_ask(loop, [5, 6, 7]).cached_tokens for _ in range(2)] == [0, 3]
    assert loop.runner.reads == [{0: 3}]


def test_slots_given_up_longest_ago_go_first():
    loop = _loop(3, canvases=1)
    for prompt in ([5, 5], [6, 6], [7, 7]):
        _ask(loop, prompt)
    assert [c[0] for c in loop.runner.committed] == [5, 6, 7], "empty slots are taken first"
    for prompt in ([5, 5, 8], [9, 9]):
        _ask(loop, prompt)
    assert [c[0] for c in loop.runner.committed] == [5, 9, 7]


def test_a_cancelled_prompt_leaves_what_it_read():
    loop = _loop(1, canvases=1)
    number = loop.add(_request(list(range(5, 25))))
    loop.step()
    loop.cancel(number)
    assert _ask(loop, list(range(5, 25))).cached_tokens == 8


def test_what_never_fits_is_refused_with_the_numbers():
    loop = _loop(1, capacity=20)
    with pytest.raises(UsageError, match="prompt of 10 tokens and max_new_tokens 16 need 22 positions, a slot has 20"):
        loop.add(_request([5] * 10, room=16))
    _ask(loop, [5] * 10, room=12)
    _ask(loop, [5] * 20, room=CANVAS)


def test_a_reset_forgets_everything():
    loop = _loop(2)
    loop.add(_request([5, 6]))
    loop.step()
    loop.reset()
    assert loop.idle and _ask(loop, [5, 6]).cached_tokens == 0
