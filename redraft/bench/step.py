"""`redraft bench step`: what one denoising pass costs, whole and by part, beside other implementations.

A pass is timed as a wall-clock mean over consecutive passes, launches and waits included; a part is timed alone. What
the parts do not add up to is reported as gaps: launches and waiting where it is positive, overlap where it is negative.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from redraft.bench.passes import DenoiseStep, FusedStep, ReferenceStep
from redraft.bench.probe import Probe
from redraft.bench.roofline import Measured, Work
from redraft.bench.timing import Timing, interleave, measure, wall_ms
from redraft.bench.work import PARTS, Shapes, encode_work, pass_work
from redraft.device import peak_bytes, reset_peak
from redraft.engine.engine import Engine
from redraft.network.arena import check_context

OURS = "redraft"
PARTS_SECONDS = 0.3  # spent on each part


def open_step(engine: Engine, batch: int, prompt_tokens: int, seed: int = 0, slots: int = 0) -> DenoiseStep:
    """Passes as the engine's tier runs them: fused in turbo where the device allows, else the reference network's.

    Raises UsageError when prompt and canvas exceed the context.
    """
    check_context(engine.config, prompt_tokens, engine.config.canvas_length)
    if engine.fused is not None and engine.tier == "turbo":
        return FusedStep(engine.fused, batch, prompt_tokens, seed, slots)
    return ReferenceStep(engine.model, batch, prompt_tokens, seed)


class Arm(Protocol):
    """One implementation in a comparison."""

    def ms_per_pass(self, passes: int) -> float:
        """Wall-clock milliseconds of one pass, from `passes` consecutive ones."""

    def details(self) -> dict[str, Any]:
        """Further figures of this run, such as versions and the time of an encode."""


class StepArm:
    """Our own passes as an arm."""

    def __init__(self, step: DenoiseStep, device: torch.device):
        self.step, self.device = step, device

    def ms_per_pass(self, passes: int) -> float:
        return wall_ms(lambda: [self.step.run_pass() for _ in range(passes)], self.device) / passes

    def details(self) -> dict[str, Any]:
        return {"implementation": self.step.name}


@dataclass(frozen=True)
class StepResult:
    """A pass by part. `arms` holds every implementation's ms of a pass, ours under OURS; `parts` and `encode` ours."""

    arms: dict[str, Timing]
    details: dict[str, dict[str, Any]]
    failed: dict[str, str]  # rivals that could not be measured
    parts: dict[str, Measured]
    encode: Measured
    weight_bytes: int
    peak_bytes: int

    @property
    def total(self) -> Measured:
        """Our pass as a whole."""
        return Measured(Work.total(p.work for p in self.parts.values()), self.arms[OURS], self.encode.roofline)

    @property
    def pass_ms(self) -> float:
        return self.arms[OURS].median

    @property
    def gaps_ms(self) -> float:
        return self.pass_ms - sum(part.ms for part in self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "ms_per_pass": self.pass_ms,
            "arms": {name: {**timing.to_dict(), **self.details[name]} for name, timing in self.arms.items()},
            "failed": self.failed,
            "parts": {name: {**p.to_dict(), "share_of_pass": p.ms / self.pass_ms} for name, p in self.parts.items()},
            "gaps_ms": self.gaps_ms,
            "total": self.total.rates(),
            "encode": self.encode.to_dict(),
            "weight_bytes": self.weight_bytes,
            "peak_bytes": self.peak_bytes,
        }


def bench_step(
    engine: Engine, probe: Probe, *, prompt_tokens: int, batch: int, passes: int, rounds: int, slots: int = 0,
    rivals: Mapping[str, Callable[[], Arm]] | None = None, progress: Callable[[str], object] = lambda doing: None,
) -> StepResult:  # fmt: skip
    """Time passes of `engine` and of every rival, interleaved in `rounds` of `passes`, then our parts one by one.

    Rivals are built after our own peak of memory was read; one that fails is named in `failed`, with the reason.
    progress(doing) is called before each of these.
    """
    device, roofline = engine.device, probe.roofline
    reset_peak(device)
    step = open_step(engine, batch, prompt_tokens, slots=slots)
    ours = StepArm(step, device)
    ours.ms_per_pass(passes)  # warm-up, and the peak of a whole run
    peak = peak_bytes(device)
    arms: dict[str, Arm] = {OURS: ours}
    failed = {}
    for name, build in (rivals or {}).items():
        progress(f"preparing {name}, which may compile for minutes")
        try:
            arm = build()
            arm.ms_per_pass(1)
            arms[name] = arm
        except Exception as e:  # another's code, compilers included, may raise anything
            failed[name] = " ".join(f"{type(e).__name__}: {e}".split())[:300]
    progress(f"timing passes of {', '.join(arms)}")
    times = interleave({name: partial(arm.ms_per_pass, passes) for name, arm in arms.items()}, rounds)
    progress("timing the parts of a pass")
    shapes, calls = Shapes.of(engine), step.parts()
    work = pass_work(shapes, batch, prompt_tokens)
    parts = {
        name: Measured(work[name], measure(calls[name], device, seconds=PARTS_SECONDS, graph=step.capturable), roofline)
        for name in PARTS
    }
    one = encode_work(shapes, prompt_tokens)
    encoding = measure(step.run_encode, device, seconds=PARTS_SECONDS)
    encode = Measured(Work(one.bytes, one.flops * batch), encoding, roofline)
    details = {name: arm.details() for name, arm in arms.items()}
    return StepResult(times, details, failed, parts, encode, engine.weight_bytes, peak)
