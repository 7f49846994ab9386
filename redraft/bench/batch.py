"""`redraft bench batch`: passes of 1 to 32 canvases, until memory ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from redraft.bench.probe import Probe
from redraft.bench.roofline import Point, Roofline, Work
from redraft.bench.step import StepArm, expert_spec, open_step
from redraft.bench.timing import Timing, interleave
from redraft.bench.work import pass_work
from redraft.device import peak_bytes, reset_peak
from redraft.errors import MemoryShortage

if TYPE_CHECKING:
    from redraft.engine.engine import Engine

SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class BatchResult:
    """Passes of one batch size. `timing` is ms per pass, None when memory did not suffice."""

    canvases: int
    work: Work
    roofline: Roofline
    timing: Timing | None
    peak_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        if self.timing is None:
            return {"canvases": self.canvases, "error": "out of memory"}
        ms = self.timing.median
        return {
            "canvases": self.canvases,
            "ms_per_pass": ms,
            "ms_low": self.timing.low,
            "ms_high": self.timing.high,
            "ms_per_pass_and_canvas": ms / self.canvases,
            "gbps": self.work.bytes / ms / 1e6,
            "tflops": self.work.flops / ms / 1e9,
            "floor_ms": self.roofline.floor_ms(self.work),
            "share_of_roofline": self.roofline.share(self.work, ms),
            "peak_bytes": self.peak_bytes,
        }

    def point(self) -> Point | None:
        return Point(f"{self.canvases} canvases", self.work, self.timing.median) if self.timing else None


def bench_batch(
    engine: Engine, probe: Probe, *, prompt_tokens: int, sizes: tuple[int, ...], passes: int, rounds: int
) -> Iterator[BatchResult]:
    """Time each batch size in turn; the first that does not fit is the last."""
    for size in sizes:
        parts = pass_work(engine.config, expert_spec(engine), engine.dtype.itemsize, size, prompt_tokens)
        work = sum(parts.values(), Work(0, 0))
        try:
            timing, peak = _time(engine, size, prompt_tokens, passes, rounds)
        except (torch.OutOfMemoryError, MemoryShortage):
            yield BatchResult(size, work, probe.roofline, None, None)
            return
        finally:
            release(engine.device)
        yield BatchResult(size, work, probe.roofline, timing, peak)


def _time(engine: Engine, size: int, prompt_tokens: int, passes: int, rounds: int) -> tuple[Timing, int]:
    reset_peak(engine.device)
    arm = StepArm(open_step(engine, size, prompt_tokens), engine.device)
    arm.ms_per_pass(2)  # warm-up
    timing = interleave({"": lambda: arm.ms_per_pass(passes)}, rounds)[""]
    return timing, peak_bytes(engine.device)


def release(device: torch.device) -> None:
    """Give the buffers of what was measured last back, so that the next finds their memory free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
