"""Serving a stream of requests: what is counted."""

from __future__ import annotations

from tiny import CANVAS

import redraft
from redraft.bench.serve_loop import Load, bench_serve_loop

LOAD = Load(requests=5, prompt_tokens=6, max_new_tokens=2 * CANVAS, passes=3, slots=2, seed=0)


def test_every_request_is_answered_at_every_rate(tiny_dir) -> None:
    engine = redraft.load(tiny_dir, weights="bf16", device="cpu")
    at_once, spread = (r.to_dict() for r in bench_serve_loop(engine, LOAD, [float("inf"), 1000.0]))
    assert (at_once["rate"], spread["rate"]) == (None, 1000.0)
    for result in (at_once, spread):
        assert result["requests"] == 5 and result["tokens_per_second"] > result["requests_per_second"]
        by_width = {int(width): count for width, count in result["passes_by_requests"].items()}
        assert sum(width * count for width, count in by_width.items()) == 5 * 2 * 3
        assert set(by_width) <= {1, 2} and sum(by_width.values()) == result["passes"]
        assert 0 < result["first_draft_seconds"]["p50"] < result["answer_seconds"]["p90"] <= result["seconds"]
    assert at_once["mean_requests_per_pass"] > 1.5
