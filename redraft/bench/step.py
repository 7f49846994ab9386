"""`redraft bench step`: what one denoising pass costs, whole and by part, beside other implementations.

A pass is timed as a wall-clock mean over consecutive passes, launches and waits included; a part is timed alone. What
the parts do not add up to is reported as gaps: launches and waiting where it is positive, overlap where it is negative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from redraft.bench.probe import Probe
from redraft.bench.roofline import Point, Roofline, Work
from redraft.bench.timing import Timing, interleave, measure, wall_ms
from redraft.bench.work import PARTS, encode_work, pass_work
from redraft.config import DecodeSettings, QuantSpec
from redraft.decode.entropy_bound import ENTROPY_BOUND
from redraft.decode.streams import CounterStream
from redraft.device import peak_bytes, reset_peak
from redraft.engine.eager import Rows
from redraft.errors import UsageError
from redraft.kernels.mlp import gated_mlp
from redraft.kernels.norms import rms_norm
from redraft.kernels.router import route
from redraft.network.arena import KVArena, check_context
from redraft.network.weights import DenseExperts, PackedExperts

if TYPE_CHECKING:
    from redraft.engine.engine import Engine
    from redraft.network.model import Model

OURS = "redraft"
# A canvas never runs out of passes, its temperature stays at t_max, and no entropy is low enough to stop.
ENDLESS_SETTINGS = DecodeSettings(max_denoising_steps=10**9, confidence_threshold=1e-30)
PARTS_SECONDS = 0.3  # spent on each part


class DenoiseStep(Protocol):
    """Denoising passes of a batch over fixed buffers, as a benchmark runs them.

    Prepared with `batch` prompts of random tokens encoded and one pass done, so that self-conditioning is in use. The
    number of passes is unlimited and none of them stops early.
    """

    name: str  # of the implementation, for the table
    capturable: bool  # whether each of `parts` may be captured as a CUDA graph

    def run_pass(self) -> object:
        """One whole pass, sampling included, as generation runs it; may return before the device is done."""
        ...

    def run_encode(self) -> object:
        """Encode the same prompts once more from the start; the canvases may begin anew."""
        ...

    def parts(self) -> Mapping[str, Callable[[], object]]:
        """Each part of a pass (a name of `work.PARTS`), all its layers, over the present buffers, whatever they hold.

        A part fused into another is left out; its work is then counted to the part named in `fused`.
        """
        ...

    def fused(self) -> Mapping[str, str]:
        """Part left out of `parts` -> the part that does its work."""
        ...


def open_step(engine: Engine, batch: int, prompt_tokens: int, seed: int = 0) -> DenoiseStep:
    """Passes as the engine's tier runs them: fused in turbo where the device allows, else the reference network's.

    Raises UsageError when prompt and canvas exceed the context.
    """
    check_context(engine.config, prompt_tokens, engine.config.canvas_length)
    if engine.fused is not None and engine.tier == "turbo":
        from redraft.bench.fused_step import FusedStep

        return FusedStep(engine.fused, batch, prompt_tokens, seed)
    return ReferenceStep(engine.model, batch, prompt_tokens, seed)


def expert_spec(engine: Engine) -> QuantSpec | None:
    """Group sizes of the experts in memory, None when they are not packed."""
    experts = engine.model.weights.layers[0].experts
    if isinstance(experts, DenseExperts):
        return None
    if not isinstance(experts, PackedExperts):
        return experts.spec
    config = engine.config
    return QuantSpec(
        config.hidden_size // experts.gu_s.shape[-1], config.moe_intermediate_size // experts.dn_s.shape[-1]
    )


def random_tokens(vocab: int, shape: tuple[int, int], seed: int, device: torch.device) -> torch.Tensor:
    """The prompts of a benchmark, the same for every implementation on one device."""
    return torch.randint(vocab, shape, generator=torch.Generator(device).manual_seed(seed), device=device)


class ReferenceStep:
    """Passes of `redraft.network.model.Model`, decoded by the entropy bound."""

    name = "reference"
    capturable = False  # the experts' loop reads its counts on the host

    def __init__(self, model: Model, batch: int, prompt_tokens: int, seed: int):
        self.model, self.config = model, model.config
        self.prompt = random_tokens(self.config.vocab_size, (batch, prompt_tokens), seed, model.device)
        self.arena = self._encoded()
        stream = CounterStream(list(range(batch)), self.config.canvas_length, self.config.vocab_size, model.device)
        self.rows = Rows(model, ENTROPY_BOUND, ENDLESS_SETTINGS, stream, self.arena)
        self.rows.start()
        self.run_pass()

    def run_pass(self) -> object:
        self.rows.run_pass()
        return None

    def run_encode(self) -> object:
        return self._encoded()

    def _encoded(self) -> KVArena:
        model = self.model
        batch, length = self.prompt.shape
        arena = KVArena(self.config, batch, length, model.dtype, model.device)
        model.encode(self.prompt, arena)
        return arena

    def fused(self) -> Mapping[str, str]:
        return {}

    def parts(self) -> Mapping[str, Callable[[], object]]:
        """The network's own pieces, fed with this canvas's embeddings in every layer."""
        model, weights, eps = self.model, self.model.weights, self.config.rms_norm_eps
        x = model._embed(self.rows.canvas)
        flat = x.flatten(0, -2)
        hidden = rms_norm(x, weights.norm, eps)
        logits = model.head(hidden)
        routes = [self._route(flat, i) for i in range(self.config.num_layers)]

        def norms() -> None:
            for w in weights.layers:
                for weight in (w.input_layernorm, w.post_attention_layernorm, w.pre_feedforward_layernorm,
                               w.post_feedforward_layernorm_1, w.pre_feedforward_layernorm_2,
                               w.post_feedforward_layernorm_2, w.post_feedforward_layernorm):  # fmt: skip
                    rms_norm(x, weight, eps)
                torch.add(x, x)
                torch.add(x, x).mul_(w.decoder_scalar)
            rms_norm(x, weights.norm, eps)

        def dense() -> None:
            for w in weights.layers:
                gated_mlp(x, w.gate_proj, w.up_proj, w.down_proj)

        def router() -> None:
            for i in range(self.config.num_layers):
                self._route(flat, i)

        def experts() -> None:
            from redraft.kernels.experts import run_experts

            for w, (routing, index) in zip(weights.layers, routes, strict=True):
                run_experts(flat, w.experts, routing, index)

        return {
            "embed": lambda: model._embed(self.rows.canvas),
            "self-conditioning": lambda: model._self_condition(x, self.rows.self_conditioning),
            "attention": lambda: self._attention(x),
            "dense": dense,
            "router": router,
            "experts": experts,
            "norms": norms,
            "head": lambda: model.head(hidden),
            "sampling": lambda: self.rows.take(logits),
        }

    def _route(self, flat: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        w, config = self.model.weights.layers[index], self.config
        return route(flat, w.router_proj, w.router_scale, w.per_expert_scale, config.top_k_experts, config.rms_norm_eps)

    def _attention(self, x: torch.Tensor) -> None:
        from redraft.network.model import _reader

        model, config = self.model, self.config
        tables = model._rope_tables(self.arena.length, x.shape[1])
        for layer, w, cache in zip(config.layers, model.weights.layers, self.arena.layers, strict=True):
            model._attention(x, layer, w, tables[layer.kind], None, _reader(cache))


class Arm(Protocol):
    """One implementation in a comparison."""

    name: str

    def ms_per_pass(self, passes: int) -> float:
        """Wall-clock milliseconds of one pass, from `passes` consecutive ones."""
        ...

    def details(self) -> dict[str, Any]:
        """Further figures of this run, such as versions and the time of an encode."""
        ...


class StepArm:
    """Our own passes as an arm."""

    name = OURS

    def __init__(self, step: DenoiseStep, device: torch.device):
        self.step, self.device = step, device

    def ms_per_pass(self, passes: int) -> float:
        def run() -> None:
            for _ in range(passes):
                self.step.run_pass()

        return wall_ms(run, self.device) / passes

    def details(self) -> dict[str, Any]:
        return {"implementation": self.step.name}


@dataclass(frozen=True)
class PartResult:
    """One part: its time and its floor. `timing` None: it runs inside the part named `within`."""

    name: str
    work: Work
    timing: Timing | None
    within: str | None = None


@dataclass(frozen=True)
class StepResult:
    """A pass by part. Times are ms; `arms` holds every implementation, ours under OURS."""

    arms: dict[str, Timing]
    details: dict[str, dict[str, Any]]
    failed: dict[str, str]  # rivals that could not be measured
    parts: list[PartResult]
    encode: Timing
    total: Work
    encode_work: Work
    roofline: Roofline
    weight_bytes: int
    peak_bytes: int

    @property
    def pass_ms(self) -> float:
        return self.arms[OURS].median

    @property
    def gaps_ms(self) -> float:
        return self.pass_ms - sum(p.timing.median for p in self.parts if p.timing)

    def points(self) -> list[Point]:
        """For the plot."""
        parts = [Point(p.name, p.work, p.timing.median) for p in self.parts if p.timing]
        return [*parts, Point("pass", self.total, self.pass_ms)]

    def to_dict(self) -> dict[str, Any]:
        return {
            "ms_per_pass": self.pass_ms,
            "arms": {name: {**_timing(t), **self.details[name]} for name, t in self.arms.items()},
            "failed": self.failed,
            "parts": {p.name: self._part(p) for p in self.parts},
            "gaps_ms": self.gaps_ms,
            "total": _limits(self.total, self.pass_ms, self.roofline),
            "encode": {**_timing(self.encode), **_limits(self.encode_work, self.encode.median, self.roofline)},
            "weight_bytes": self.weight_bytes,
            "peak_bytes": self.peak_bytes,
        }

    def _part(self, part: PartResult) -> dict[str, Any]:
        if part.timing is None:
            return {"within": part.within}
        share = part.timing.median / self.pass_ms
        limits = _limits(part.work, part.timing.median, self.roofline)
        return {**_timing(part.timing), "share_of_pass": share, **limits}


def _timing(timing: Timing) -> dict[str, Any]:
    return {"ms": timing.median, "ms_low": timing.low, "ms_high": timing.high, "runs": timing.runs}


def _limits(work: Work, ms: float, roofline: Roofline) -> dict[str, Any]:
    return {
        "bytes": work.bytes,
        "flops": work.flops,
        "gbps": work.bytes / ms / 1e6,
        "tflops": work.flops / ms / 1e9,
        "floor_ms": roofline.floor_ms(work),
        "share_of_roofline": roofline.share(work, ms),
    }


def bench_step(
    engine: Engine,
    probe: Probe,
    *,
    prompt_tokens: int,
    batch: int,
    passes: int,
    rounds: int,
    rivals: Mapping[str, Callable[[], Arm]] | None = None,
    progress: Callable[[str], object] = lambda doing: None,
) -> StepResult:
    """Time passes of `engine` and of every rival, interleaved in `rounds` of `passes`, then our parts one by one.

    Rivals are built after our own peak of memory was read; one that fails is named in `failed`, with the reason.
    progress(doing) is called before each of these.
    """
    device = engine.device
    reset_peak(device)
    step = open_step(engine, batch, prompt_tokens)
    ours = StepArm(step, device)
    ours.ms_per_pass(passes)  # warm-up, and the peak of a whole run
    peak = peak_bytes(device)
    others, failed = _build(rivals or {}, progress)
    arms: dict[str, Arm] = {OURS: ours, **others}
    progress(f"timing passes of {', '.join(arms)}")
    times = interleave({name: _timed(arm, passes) for name, arm in arms.items()}, rounds)
    progress("timing the parts of a pass")
    itemsize, spec = engine.dtype.itemsize, expert_spec(engine)
    work = pass_work(engine.config, spec, itemsize, batch, prompt_tokens)
    one = encode_work(engine.config, spec, itemsize, prompt_tokens)
    return StepResult(
        arms=times,
        details={name: arm.details() for name, arm in arms.items()},
        failed=failed,
        parts=time_parts(step, work, device),
        encode=measure(step.run_encode, device, seconds=PARTS_SECONDS),
        total=sum(work.values(), Work(0, 0)),
        encode_work=Work(one.bytes, one.flops * batch),
        roofline=probe.roofline,
        weight_bytes=engine.weight_bytes,
        peak_bytes=peak,
    )


def _build(
    rivals: Mapping[str, Callable[[], Arm]], progress: Callable[[str], object]
) -> tuple[dict[str, Arm], dict[str, str]]:
    """Rivals that ran a pass, and why the others did not."""
    arms, failed = {}, {}
    for name, build in rivals.items():
        progress(f"preparing {name}, which may compile for minutes")
        try:
            arm = build()
            arm.ms_per_pass(1)
            arms[name] = arm
        except Exception as e:  # another's code, compilers included, may raise anything
            failed[name] = " ".join(f"{type(e).__name__}: {e}".split())[:300]
    return arms, failed


def _timed(arm: Arm, passes: int) -> Callable[[], float]:
    return lambda: arm.ms_per_pass(passes)


def time_parts(step: DenoiseStep, work: Mapping[str, Work], device: torch.device) -> list[PartResult]:
    """Each part alone, in the order of a pass; the work of a fused part is added to the part that does it."""
    calls, fused = step.parts(), step.fused()
    missing = [name for name in PARTS if name not in calls and fused.get(name) not in calls]
    if missing:
        raise UsageError(f"{step.name}: the parts {', '.join(missing)} are neither given nor said to be fused")
    results = []
    for name in PARTS:
        if name not in calls:
            results.append(PartResult(name, work[name], None, fused[name]))
            continue
        done = sum((work[other] for other, into in fused.items() if into == name), work[name])
        timing = measure(calls[name], device, seconds=PARTS_SECONDS, graph=step.capturable)
        results.append(PartResult(name, done, timing))
    return results
