"""Timing: warm-up, then medians; on a GPU by events, and as a CUDA graph where launches would be timed instead."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from redraft.device import synchronize

Call = Callable[[], Any]

WARM_UP = 3
LEAST_RUNS, MOST_RUNS = 5, 200


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median and the 10th and 90th percentile. `graph`: replayed as a CUDA graph."""

    median: float
    low: float
    high: float
    runs: int
    graph: bool = False

    @classmethod
    def of(cls, samples: Sequence[float], graph: bool = False) -> Self:
        median, low, high = (percentile(samples, q) for q in (50, 10, 90))
        return cls(median, low, high, len(samples), graph)

    def to_dict(self) -> dict[str, Any]:
        return {"ms": self.median, "ms_low": self.low, "ms_high": self.high, "runs": self.runs}


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), linear between neighbours. No values are an error."""
    if not values:
        raise ValueError("percentile of no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def wall_ms(call: Call, device: torch.device) -> float:
    """Wall-clock milliseconds of one call, the device's work included."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - began) * 1e3


def measure(calls: Call | Sequence[Call], device: torch.device, *, seconds: float = 0.3, graph: bool = False) -> Timing:
    """Time of one call after warming up, repeated for about `seconds`.

    Several calls (the same work on other data) are timed as one sequence and their mean taken: where their data exceed
    the cache, each starts cold. `graph` replays the sequence as a CUDA graph, so that no launch is timed; the calls
    must then neither wait for the device nor allocate outside torch's allocator.
    """
    sequence = [calls] if callable(calls) else list(calls)

    def run() -> None:
        for call in sequence:
            call()

    timed, graph = run, graph and device.type == "cuda"
    if graph:
        from redraft.engine.graphs import PassGraph  # and with it Triton, whose interpreter is chosen at import

        timed = PassGraph(run, device).replay
    for _ in range(WARM_UP):
        timed()
    once = _sample(timed, device)
    runs = max(LEAST_RUNS, min(MOST_RUNS, round(seconds * 1e3 / max(once, 1e-3))))
    return Timing.of([_sample(timed, device) / len(sequence) for _ in range(runs)], graph)


def interleave(arms: dict[str, Callable[[], float]], rounds: int) -> dict[str, Timing]:
    """Sample every arm once a round, so that a clock that drifts drifts for all. An arm returns its milliseconds."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            samples[name].append(arm())
    return {name: Timing.of(values) for name, values in samples.items()}


def _sample(call: Call, device: torch.device) -> float:
    """Milliseconds of one call: between two events on a GPU, by the clock elsewhere."""
    if device.type != "cuda":
        return wall_ms(call, device)
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    before.record()
    call()
    after.record()
    torch.cuda.synchronize(device)
    return before.elapsed_time(after)
