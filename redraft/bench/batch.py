"""`redraft bench batch`: passes of 1 to 32 canvases, until memory ends."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from redraft.bench.probe import Probe
from redraft.bench.roofline import Measured, Work
from redraft.bench.step import StepArm, open_step
from redraft.bench.timing import interleave
from redraft.bench.work import Shapes, pass_work
from redraft.device import peak_bytes, reset_peak
from redraft.engine.engine import Engine
from redraft.errors import MemoryShortage

OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class BatchResult:
    """Passes of one batch size; `measured` is None when memory did not suffice."""

    canvases: int
    measured: Measured | None
    peak_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        if self.measured is None:
            return {"canvases": self.canvases, "error": OUT_OF_MEMORY}
        figures = self.measured.to_dict()
        ms, kept = figures["ms"], ("ms_low", "ms_high", "gbps", "tflops", "floor_ms", "share_of_roofline")
        per_pass = {"ms_per_pass": ms, "ms_per_pass_and_canvas": ms / self.canvases}
        rest = {name: figures[name] for name in kept}
        return {"canvases": self.canvases, **per_pass, **rest, "peak_bytes": self.peak_bytes}


def bench_batch(
    engine: Engine, probe: Probe, *, prompt_tokens: int, sizes: tuple[int, ...], passes: int, rounds: int
) -> Iterator[BatchResult]:
    """Time each batch size in turn; the first that does not fit is the last."""
    for size in sizes:
        try:
            yield _bench(engine, probe, size, prompt_tokens, passes, rounds)
        except (torch.OutOfMemoryError, MemoryShortage):
            yield BatchResult(size, None)
            return
        finally:
            release(engine.device)


def _bench(engine: Engine, probe: Probe, size: int, prompt_tokens: int, passes: int, rounds: int) -> BatchResult:
    work = pass_work(Shapes.of(engine), size, prompt_tokens)
    reset_peak(engine.device)
    arm = StepArm(open_step(engine, size, prompt_tokens), engine.device)
    arm.ms_per_pass(2)  # warm-up
    timing = interleave({"": lambda: arm.ms_per_pass(passes)}, rounds)[""]
    measured = Measured(Work.total(work.values()), timing, probe.roofline)
    return BatchResult(size, measured, peak_bytes(engine.device))


def release(device: torch.device) -> None:
    """Give the buffers of what was measured last back, so that the next finds their memory free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
