"""Captured passes: widths and lanes, memory, and no graph freed in the middle of another capture.

On a CPU the same launches run through Triton's interpreter.
"""

import gc
import random
import weakref
from dataclasses import replace

import pytest
import torch
from test_loop import finish

import redraft
from redraft.config import DecodeSettings
from redraft.decode.entropy_bound import ENTROPY_BOUND
from redraft.engine.events import Committed, Draft, Result
from redraft.engine.graphs import GraphRunner, PassGraph, planned_bytes, widths
from redraft.engine.loop import Loop, Request
from redraft.network.fused import FusedModel
from redraft.quant.load import load_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPTS = [[5, 6, 7], [9] * 20]
SETTINGS = DecodeSettings(max_denoising_steps=2, max_new_tokens=24, eos_token_ids=())


@pytest.fixture(scope="module")
def model() -> FusedModel:
    checkpoint = load_checkpoint("random:tiny", "w4", torch.bfloat16, DEVICE)
    return FusedModel(checkpoint.config, checkpoint.weights, checkpoint.spec)


@pytest.fixture(scope="module")
def runner(model: FusedModel) -> GraphRunner:
    return GraphRunner(model, 3, 40)


def _request(prompt: list[int], seed: int, **changes: object) -> Request:
    return Request(prompt, ENTROPY_BOUND, replace(SETTINGS, **changes), seed)


def _run(runner: GraphRunner, *requests: Request) -> list[list]:
    """Events of each request, in a loop of their own."""
    loop = Loop(runner, runner.model.config)
    numbers = [loop.add(request) for request in requests]
    events = finish(loop)
    return [events[number] for number in numbers]


def _replayed(runner: GraphRunner, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """The rule of each pass that is replayed from now on (in name only), and the slots in its lanes."""
    passes: list[tuple[str, list[int]]] = []
    for (rule, width), graph in runner._passes.items():
        table = runner.work.lanes[width].table
        monkeypatch.setattr(graph, "replay", lambda n=rule.name, t=table: passes.append((n, t.tolist())))
    return passes


def test_widths_are_powers_of_two_and_all_slots():
    assert [widths(n) for n in (1, 2, 3, 5, 8, 32)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 8], [1, 2, 4, 8, 16, 32],
    ]  # fmt: skip


def test_one_request_from_prompt_to_answer(runner: GraphRunner):
    """A prompt longer than a canvas, one canvas, two passes; the other slots stay empty."""
    runner.reset()
    *drafts, committed, result = _run(runner, _request(list(range(30, 50)), 3, max_new_tokens=5))[0]
    assert [(d.canvas, d.step) for d in drafts] == [(0, 1), (0, 2)]
    assert all(d.accepted[d.accepted.index(True)] and d.mean_entropy > 0 for d in drafts)
    assert committed.tokens == result.token_ids == drafts[-1].tokens[:5]
    assert (result.steps_per_canvas, result.finish_reason, result.prompt_tokens) == ([2], "length", 20)
    assert runner.arena.length.tolist() == [20, 0, 0]


def test_lanes_hold_the_slots_of_a_pass_and_finished_ones(model: FusedModel, monkeypatch: pytest.MonkeyPatch):
    runner = GraphRunner(model, 5, 40)
    passes = _replayed(runner, monkeypatch)
    for slot in (3, 0, 4):
        runner.admit(slot, 10 + slot, ENTROPY_BOUND, SETTINGS, 0, keep=False, positions=8)
    for slots in ([3], [3, 0], [3, 0, 4], [4, 1, 2, 0, 3]):
        for slot in slots:
            runner._rules[slot], runner._owners[slot] = ENTROPY_BOUND, slot
        runner.run_pass(slots)
    assert [lanes for _, lanes in passes] == [[3], [3, 0], [3, 0, 4, 1], [4, 1, 2, 0, 3]]


def test_slots_of_another_rule_are_never_in_a_spare_lane(model: FusedModel, monkeypatch: pytest.MonkeyPatch):
    class Other(type(ENTROPY_BOUND)):
        name = "other"

    other = Other()
    runner = GraphRunner(model, 4, 40, rules=(ENTROPY_BOUND, other))
    passes = _replayed(runner, monkeypatch)
    for slot, rule in enumerate((ENTROPY_BOUND, other, ENTROPY_BOUND, ENTROPY_BOUND)):
        runner.admit(slot, slot, rule, SETTINGS, 0, keep=False, positions=8)
    runner.run_pass([0, 2, 3])
    runner.run_pass([1])
    assert passes == [("entropy-bound", [0, 2]), ("entropy-bound", [3]), ("other", [1])]


@pytest.mark.gpu
def test_a_slot_does_as_well_in_any_lane(runner: GraphRunner):
    """Three requests that join one after the other and leave in another order: each as it is alone, to the token.

    So every table of slots is used: full, partial, permuted, with a finished slot in a spare lane.
    """
    requests = [_request([5, 6, 7], 1), _request([9] * 5, 2, max_new_tokens=10), _request([8, 4], 3)]
    alone = []
    for request in requests:
        runner.reset()
        alone.append(_run(runner, request)[0][-1].token_ids)
    runner.reset()
    loop = Loop(runner, runner.model.config)
    numbers, answers = {}, {}
    for step in range(40):
        if step < 3:
            numbers[loop.add(requests[step])] = step
        for number, event in loop.step():
            if isinstance(event, Result):
                answers[numbers[number]] = event.token_ids
    assert [answers[i] for i in range(3)] == alone
    assert len({tuple(a) for a in alone}) == 3


def test_planned_memory_is_what_is_allocated(runner: GraphRunner):
    config = runner.model.config
    allocated = sum(t.numel() * t.element_size() for kv in runner.arena.layers for t in (kv.keys, kv.values))
    rows = 3 * config.canvas_length
    logits = 2 * rows * config.vocab_size
    planned = planned_bytes(runner.model, 3, runner.capacity)
    assert allocated + logits < planned < 3 * (allocated + logits) + 2**23
    shorter, longer = (planned_bytes(runner.model, 3, capacity) for capacity in (2000, 2100))
    # Only the one full layer grows: K and V of 3 slots, 1 head of 32, BF16, 100 positions; and the weights of
    # attention, BF16 and two fp32 statistics for every row of every width, query head and block of 128 positions.
    lanes = sum(widths(3)) * config.canvas_length
    assert longer - shorter == 2 * 3 * 32 * 2 * 100 + lanes * config.num_heads * (128 * 2 + 8)


def test_a_runner_is_freed_the_moment_nobody_holds_it(model: FusedModel, no_collection):
    """No reference cycle: a garbage collection in the middle of a later capture would free its graphs there."""
    runner = GraphRunner(model, 2, 40)
    _run(runner, _request([5, 6], 1, max_new_tokens=5))
    dead = [weakref.ref(part) for part in (runner, runner.work, runner.arena, runner.state)]
    del runner
    assert [ref() for ref in dead] == [None] * 4
    runner = GraphRunner(model, 1, 40)
    work = weakref.ref(runner.work)
    runner.close()
    assert work() is None


@pytest.mark.gpu
def test_a_graph_keeps_the_workspace_of_its_products():
    """torch frees workspaces when it deletes or compiles other graphs. Whoever gets that memory must not find our sums
    in it, nor we theirs."""
    device = torch.device("cuda")
    x, w = torch.randn(2, 64, 65536, device=device).bfloat16()  # a long sum, which the library splits over a workspace
    out = torch.empty(64, 64, dtype=torch.bfloat16, device=device)
    graph = PassGraph(lambda: torch.mm(x, w.t(), out=out), device)
    graph.replay()
    expected = out.clone()
    torch._C._cuda_clearCublasWorkspaces()
    others = []
    for _ in range(32):  # each of torch's streams, as memory goes back to the stream that it was taken on
        with torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
            others.append(torch.full((2**23,), 7, dtype=torch.int32, device=device))
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    assert all(bool((other == 7).all()) for other in others)


class _Cycle:
    """A captured graph that only a garbage collection frees."""

    def __init__(self, device: torch.device):
        self.me, self.x = self, torch.ones(8, device=device)
        self.graph = PassGraph(lambda: self.x.add_(1), device)


@pytest.mark.gpu
def test_garbage_is_not_collected_during_a_capture():
    """Graphs in cycles, whoever made them, with a collection due at any allocation of an object."""
    device = torch.device("cuda")
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(30):
            _Cycle(device)
        x = torch.zeros(8, device=device)
        graph = PassGraph(lambda: [x.add_(float(len([[] for _ in range(50)]))) for _ in range(20)], device)
    finally:
        gc.set_threshold(*threshold)
    x.zero_()
    graph.replay()
    assert x.tolist() == [1000.0] * 8


@pytest.mark.gpu
def test_three_hundred_batches_of_changing_width_hold_steady_memory():
    """Widths, lengths and their order as they come, collections at any moment, nothing left behind."""
    engine = redraft.load("demo", device="cuda", dtype=torch.bfloat16)
    rng, held = random.Random(1), []
    prompts = ["What is the capital of France?", "Tell a story about Mia and a fox."]
    threshold = gc.get_threshold()
    for call in range(300):
        gc.set_threshold(*((1, 1, 1) if call % 10 == 0 else threshold))
        width, tokens = rng.choice([1, 2, 3, 4, 5, 8]), rng.choice([64, 128, 256, 512])
        batch = [prompts[(call + i) % 2] for i in range(width)]
        results = engine.generate_batch(batch, seed=[7] * width, max_new_tokens=tokens)
        assert all(result.tokens for result in results)
        if call in (99, 199, 299):
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
    gc.set_threshold(*threshold)
    assert max(held) - min(held) < 2**20, held
    engine.close()
    assert torch.cuda.memory_allocated() < held[-1] / 2


@pytest.mark.gpu
def test_streams_stepped_in_turn_on_one_engine():
    engine = redraft.load("demo", device="cuda", dtype=torch.bfloat16)
    alone = [engine.generate("Tell a story about Mia and a fox.", seed=seed).token_ids for seed in (1, 2)]
    streams = [engine.stream("Tell a story about Mia and a fox.", seed=seed) for seed in (1, 2)]
    answers: list[Result] = []
    while len(answers) < 2:
        for stream in streams:
            event = next(stream, None)
            if isinstance(event, Result):
                answers.append(event)
    assert sorted(a.seed for a in answers) == [1, 2]
    assert {a.seed: a.prompt_tokens for a in answers}.keys() == {1, 2}
    assert [a.token_ids for a in sorted(answers, key=lambda a: a.seed)] == alone


@pytest.mark.gpu
def test_events_of_a_batch(runner: GraphRunner):
    runner.reset()
    requests = [_request(prompt, seed) for prompt, seed in zip(PROMPTS, (1, 2), strict=True)]
    rows = _run(runner, *requests)
    for events in rows:
        drafts, committed = [e for e in events if isinstance(e, Draft)], [e for e in events if isinstance(e, Committed)]
        result = events[-1]
        assert isinstance(result, Result)
        assert [(d.canvas, d.step) for d in drafts] == [(0, 1), (0, 2), (1, 1), (1, 2)]
        assert result.steps_per_canvas == [2, 2] == [c.steps for c in committed]
        assert len(result.token_ids) == 24
        assert result.finish_reason == "length"
        assert [t for c in committed for t in c.tokens] == result.token_ids
        assert drafts[1].tokens == committed[0].tokens
        assert all(0 < sum(d.accepted) <= 16 for d in drafts)
    assert rows[0][-1].token_ids != rows[1][-1].token_ids
    # A request that is left in the middle does not disturb the next.
    loop = Loop(runner, runner.model.config)
    left = [loop.add(replace(request, seed=8)) for request in requests]
    loop.step()
    for number in left:
        loop.cancel(number)
    runner.reset()
    again = _run(runner, *requests)
    assert [events[-1].token_ids for events in again] == [events[-1].token_ids for events in rows]
