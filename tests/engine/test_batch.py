"""Requests in slots, on fused passes: counting, cutting, independence, and being left in the middle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from redraft.config import DecodeSettings
from redraft.engine.batch import Request, SlotBatch
from redraft.engine.events import Committed, Draft, Result
from redraft.engine.graphs import SlotRunner, planned_bytes
from redraft.network.fused import FusedModel
from redraft.store.read import load_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPTS = [[5, 6, 7], [9] * 20]
RULE = DecodeSettings(max_denoising_steps=2, max_new_tokens=24, eos_token_ids=())


@pytest.fixture(scope="module")
def runner():
    checkpoint = load_checkpoint("random:tiny", "w4", torch.bfloat16, DEVICE)
    return SlotRunner(FusedModel(checkpoint.config, checkpoint.weights, checkpoint.spec), 2, 40)


def _run(runner: SlotRunner, rule: DecodeSettings = RULE, seeds: tuple[int, int] = (1, 2)) -> list[list]:
    requests = [Request(prompt, seed) for prompt, seed in zip(PROMPTS, seeds, strict=True)]
    events: list[list] = [[], []]
    for row, event in SlotBatch(runner, lambda ids: "".join(map(chr, ids)), requests, rule).run(DEVICE, drafts=True):
        events[row].append(event)
    return events


def test_one_request_from_prompt_to_answer(runner):
    """A prompt longer than a canvas, one canvas, two passes; the other slot stays empty."""
    prompt = list(range(30, 50))
    request = Request(list(prompt), seed=3)
    rule = replace(RULE, max_new_tokens=5)
    *drafts, committed, result = (e for _, e in SlotBatch(runner, str, [request], rule).run(DEVICE, drafts=True))
    assert [(d.canvas, d.step) for d in drafts] == [(0, 1), (0, 2)]
    assert all(d.accepted[d.accepted.index(True)] and d.mean_entropy > 0 for d in drafts)
    assert committed.tokens == result.token_ids == drafts[-1].tokens[:5]
    assert (result.steps_per_canvas, result.finish_reason, result.prompt_tokens) == ([2], "length", 20)
    assert runner.arena.length.tolist() == [20, 0]


def test_planned_memory_is_what_is_allocated(runner):
    allocated = sum(t.numel() * t.element_size() for kv in runner.arena.layers for t in (kv.keys, kv.values))
    rows = 2 * runner.config.canvas_length
    logits = 2 * rows * runner.config.vocab_size
    planned = planned_bytes(runner.model, 2, runner.capacity, runner.piece)
    assert allocated + logits < planned < 3 * (allocated + logits) + 2**22
    longer = planned_bytes(runner.model, 2, runner.capacity + 100, runner.piece)
    # Only the one full layer grows: K and V of 2 slots, 1 head of 32, BF16, 100 positions; and the weights of
    # attention, BF16 and two fp32 statistics for every canvas row, query head and block of 128 positions.
    heads = runner.config.num_heads
    blocks = -(-(runner.capacity + 100) // 128) - -(-runner.capacity // 128)
    assert longer - planned == 2 * 2 * 32 * 2 * 100 + rows * heads * blocks * (128 * 2 + 8)


@pytest.mark.gpu
def test_events_of_a_batch(runner):
    rows = _run(runner)
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
    requests = [Request(prompt, 8) for prompt in PROMPTS]
    next(SlotBatch(runner, str, requests, RULE).run(DEVICE, drafts=True))
    again = _run(runner)
    assert [events[-1].token_ids for events in again] == [events[-1].token_ids for events in rows]
