"""`redraft bench serve-loop`: requests that arrive as a Poisson stream, at several rates.

A request is a prompt of random tokens and an answer of fixed length in a fixed number of passes a canvas, so that speed
alone shows. Times count from its arrival: waiting for a slot is part of them.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from redraft.bench.passes import random_tokens
from redraft.bench.timing import percentile
from redraft.config import DecodeSettings
from redraft.decode.rule import DEFAULT_RULE, find_rule
from redraft.engine.engine import Engine
from redraft.engine.events import Draft, Result
from redraft.engine.loop import Loop, Request


@dataclass(frozen=True)
class Load:
    """What every request asks for, and how many there are."""

    requests: int
    prompt_tokens: int
    max_new_tokens: int
    passes: int  # of each canvas
    slots: int
    seed: int

    def settings(self) -> DecodeSettings:
        """A canvas of n passes never has n equal ones before it, and no token ends an answer."""
        return DecodeSettings(
            max_new_tokens=self.max_new_tokens, max_denoising_steps=self.passes, stability_threshold=self.passes,
            eos_token_ids=(),
        )  # fmt: skip


@dataclass
class RateResult:
    """One rate of arrivals, requests a second; seconds of each request, and requests in each pass."""

    rate: float
    seconds: float = 0.0
    tokens: int = 0
    first_draft: list[float] = field(default_factory=list)
    answer: list[float] = field(default_factory=list)
    widths: Counter[int] = field(default_factory=Counter)

    def to_dict(self) -> dict[str, Any]:
        passes = self.widths.total()
        return {
            "rate": self.rate if self.rate < float("inf") else None,  # null: all at once
            "requests": len(self.answer),
            "seconds": self.seconds,
            "requests_per_second": len(self.answer) / self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "first_draft_seconds": {f"p{q}": percentile(self.first_draft, q) for q in (50, 90)},
            "answer_seconds": {f"p{q}": percentile(self.answer, q) for q in (50, 90)},
            "passes": passes,
            "mean_requests_per_pass": sum(n * count for n, count in self.widths.items()) / passes,
            "passes_by_requests": {str(n): self.widths[n] for n in sorted(self.widths)},
        }


def bench_serve_loop(
    engine: Engine, load: Load, rates: Sequence[float], progress: Callable[[str], object] = lambda doing: None
) -> Iterator[RateResult]:
    """Serve the same requests at each rate in turn, on one loop. Raises UsageError or MemoryShortage."""
    rule, settings = find_rule(DEFAULT_RULE), load.settings()
    vocab, shape = engine.config.vocab_size, (load.requests + load.slots, load.prompt_tokens)
    prompts = random_tokens(vocab, shape, load.seed, engine.device).tolist()
    requests = [Request(prompt, rule, settings, load.seed + i) for i, prompt in enumerate(prompts)]
    progress(f"capturing passes of {load.slots} slots")
    loop = engine.open_loop(load.slots, requests[0].positions(engine.config.canvas_length))
    try:
        _serve(loop, requests[load.requests :], [0.0] * load.slots, RateResult(0.0))  # warm-up
        for rate in rates:
            loop.reset()  # no prefix of an earlier rate is resident
            progress(f"{load.requests} requests, {rate:g} a second")
            draw, arrivals, now = random.Random(load.seed), [], 0.0
            for _ in range(load.requests):
                now += draw.expovariate(rate) if rate < float("inf") else 0.0
                arrivals.append(now)
            yield _serve(loop, requests[: load.requests], arrivals, RateResult(rate))
    finally:
        loop.runner.close()


def _serve(loop: Loop, requests: Sequence[Request], arrivals: Sequence[float], result: RateResult) -> RateResult:
    """Add every request when it is due, and step until all are answered."""
    began, due = time.perf_counter(), 0
    arrived: dict[int, float] = {}
    drafted: set[int] = set()
    while due < len(requests) or not loop.idle:
        now = time.perf_counter() - began
        while due < len(requests) and arrivals[due] <= now:
            arrived[loop.add(requests[due])] = arrivals[due]
            due += 1
        if loop.idle:
            time.sleep(arrivals[due] - now)
            continue
        events = loop.step()
        if loop.width:
            result.widths[loop.width] += 1
        now = time.perf_counter() - began
        for number, event in events:
            if isinstance(event, Draft) and number not in drafted:
                drafted.add(number)
                result.first_draft.append(now - arrived[number])
            if isinstance(event, Result):
                result.answer.append(now - arrived[number])
                result.tokens += event.tokens
    result.seconds = time.perf_counter() - began
    return result
