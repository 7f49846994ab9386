"""`redraft profile`: where a pass's time goes, how busy the GPU is, and what each part could give at most.

Amdahl's bound of a part: were it free, a pass would take the rest, and be pass / rest times as fast. The GPU is busy
while at least one of its operations runs; that time comes from the profiler, the pass's from a run without it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from redraft.bench.passes import DenoiseStep
from redraft.bench.step import StepResult
from redraft.device import synchronize

PROFILED_PASSES = 4
TOP_OPERATIONS = 20


@dataclass(frozen=True)
class Operation:
    """One kind of device operation: how often a pass runs it, and its time in a pass."""

    name: str
    count: float
    ms: float


@dataclass(frozen=True)
class DeviceActivity:
    """What the GPU did in one pass. `operations` are its most expensive ones."""

    busy_ms: float
    count: float
    operations: list[Operation]


@dataclass(frozen=True)
class Bound:
    """What making one part free would leave."""

    name: str
    ms: float
    left_ms: float
    speedup: float


def amdahl(step: StepResult) -> list[Bound]:
    """Every timed part and the gaps, the most expensive first."""
    times = {name: part.ms for name, part in step.parts.items()} | {"gaps": step.gaps_ms}
    bounds = []
    for name, ms in sorted(times.items(), key=lambda item: -item[1]):
        left = step.pass_ms - ms
        bounds.append(Bound(name, ms, left, step.pass_ms / left if left > 0 else float("inf")))
    return bounds


def device_activity(step: DenoiseStep, device: torch.device) -> DeviceActivity | None:
    """Profile a few passes; None without a GPU."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    step.run_pass()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_PASSES):
            step.run_pass()
        synchronize(device)
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(str(event.name), float(event.time_range.start), float(event.time_range.end)) for event in events]
    return summarise(spans, PROFILED_PASSES)


def summarise(spans: Iterable[tuple[str, float, float]], passes: int) -> DeviceActivity:
    """Activity per pass from (name, start, end) of device operations, in us; those at the same time count once."""
    spans = sorted(spans, key=lambda span: span[1])
    busy, until = 0.0, float("-inf")
    counts: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for name, start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
        counts[name] += 1
        times[name] += end - start  # type: ignore[assignment]
    operations = [Operation(n, counts[n] / passes, us / passes / 1e3) for n, us in times.most_common(TOP_OPERATIONS)]
    return DeviceActivity(busy / passes / 1e3, len(spans) / passes, operations)


def to_dict(step: StepResult, activity: DeviceActivity | None) -> dict[str, Any]:
    """The JSON of a profile: that of the step, the bounds, and the GPU's activity where there is a GPU."""
    bounds = {b.name: {"ms": b.ms, "left_ms": b.left_ms, "speedup": b.speedup} for b in amdahl(step)}
    gpu = activity and {
        "busy_ms": activity.busy_ms,
        "busy_share": activity.busy_ms / step.pass_ms,
        "operations_per_pass": activity.count,
        "operations": [asdict(operation) for operation in activity.operations],
    }
    return {**step.to_dict(), "amdahl": bounds, "gpu": gpu}
