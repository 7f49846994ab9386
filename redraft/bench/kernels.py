"""`redraft bench kernels`: every kernel against its torch reference, first for correctness, then for speed.

The files of `bench/cases/`, one for each part of a pass, hold `CASES`. A case builds a `Problem`: fresh random inputs,
a call, and what the call must write. The gate poisons every output, compares it with the reference and wants a second
run to repeat it bit for bit; only what passes is timed. On a GPU a case runs at the real model's shapes over several
sets of inputs that together exceed the L2 cache, replayed as one CUDA graph. Without a GPU Triton's interpreter runs
the gate at small shapes, and there is no speed to report.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from redraft.bench.cases.case import Changes, KernelCase, Problem, Scale, Tensors
from redraft.bench.roofline import Measured, Roofline, Work
from redraft.bench.timing import Timing, measure
from redraft.config import QuantSpec
from redraft.errors import RedraftError, UsageError
from redraft.store.random import PRESETS

POISON_INT = -77  # no kernel writes it
CACHES = 3  # times the L2 cache that all sets of inputs take
MOST_COPIES = 32


@dataclass(frozen=True)
class Gate:
    """Whether a kernel is right. error: the largest relative error of its outputs."""

    passed: bool
    error: float
    reason: str = ""


@dataclass(frozen=True)
class KernelResult:
    """One case: its gate and, where it passed on a GPU, the times in ms."""

    name: str
    gate: Gate
    tolerance: float | None
    work: Work | None = None
    timing: Timing | None = None
    stock_ms: float | None = None
    compiled_ms: float | None = None

    def measured(self, roofline: Roofline) -> Measured | None:
        return Measured(self.work, self.timing, roofline) if self.work and self.timing else None

    def to_dict(self, roofline: Roofline | None) -> dict[str, Any]:
        gate = self.gate
        result: dict[str, Any] = {
            "kernel": self.name, "passed": gate.passed, "error": gate.error, "tolerance": self.tolerance,
            "reason": gate.reason,
        }  # fmt: skip
        if roofline and (measured := self.measured(roofline)):
            timing = measured.timing
            ms = {
                "us": timing.median, "us_low": timing.low, "us_high": timing.high, "floor_us": measured.floor_ms,
                "torch_us": self.stock_ms, "compiled_us": self.compiled_ms,
            }  # fmt: skip
            result |= {name: None if value is None else value * 1e3 for name, value in ms.items()}
            rates = measured.rates()
            result |= {name: rates[name] for name in ("bytes", "flops", "gbps", "share_of_roofline")}
        return result


def use_interpreter() -> None:
    """Have Triton interpret kernels, as a machine without a GPU must. Raises RedraftError when it is too late."""
    os.environ["TRITON_INTERPRET"] = "1"
    from redraft.kernels.launch import INTERPRET

    if not INTERPRET.value:
        raise RedraftError("Triton was imported before its interpreter was switched on; set TRITON_INTERPRET=1")


def load_cases() -> list[KernelCase]:
    """Every case, in the order of their names. Raises RedraftError without Triton."""
    from redraft.kernels.launch import HAS_TRITON

    if not HAS_TRITON:
        raise RedraftError("the kernels need Triton, which is not installed; torch's operations run in their place")
    from redraft.bench.cases import attention, feed_forward, norms, sampling

    found = [*attention.CASES, *feed_forward.CASES, *norms.CASES, *sampling.CASES]
    return sorted(found, key=lambda case: case.name)


def select_cases(pattern: str | None) -> list[KernelCase]:
    """Cases whose name contains `pattern`. Raises UsageError when there is none."""
    cases = load_cases()
    chosen = [case for case in cases if pattern is None or pattern in case.name]
    if not chosen:
        raise UsageError(f"no kernel is called like {pattern!r}; there are {', '.join(c.name for c in cases)}")
    return chosen


def scale_for(device: torch.device, batch: int = 1, prompt_tokens: int = 1024) -> Scale:
    """The real shapes on a GPU; small ones for the interpreter elsewhere."""
    if device.type == "cuda":
        return Scale(PRESETS["26b-a4b"], QuantSpec(), batch, prompt_tokens, device)
    return Scale(PRESETS["tiny"], QuantSpec(), batch, min(prompt_tokens, 60), device)


def bench_kernels(
    cases: list[KernelCase], scale: Scale, *, seed: int = 0, compile_stock: bool = False
) -> Iterator[KernelResult]:
    """Check every case and, on a GPU, time those that are right."""
    for case in cases:
        yield _bench(case, scale, seed, compile_stock)


def _bench(case: KernelCase, scale: Scale, seed: int, compile_stock: bool) -> KernelResult:
    generator = torch.Generator(scale.device).manual_seed(seed)
    try:
        problem = case.build(scale, generator, {})
        gate = check(problem)
    except Exception as e:  # a kernel may fail to compile or to launch in many ways: that is its result, not the end
        reason = f"{type(e).__name__}: {next(iter(str(e).strip().splitlines()), '').strip()}"
        return KernelResult(case.name, Gate(False, float("inf"), reason[:300]), None)
    if not gate.passed or scale.device.type != "cuda":
        return KernelResult(case.name, gate, problem.tolerance)
    problems = copies(case, scale, generator, problem, {})
    timing = time_problems(problems, scale.device)
    stock = [p.stock for p in problems if p.stock is not None]
    stock_ms = _rival_ms(stock, scale.device)
    compiled_ms = _rival_ms(stock[:2], scale.device, compiled=True) if compile_stock and problem.compiles else None
    return KernelResult(case.name, gate, problem.tolerance, problem.work, timing, stock_ms, compiled_ms)


def _rival_ms(calls: Sequence[Callable[[], object]], device: torch.device, compiled: bool = False) -> float | None:
    """Milliseconds of torch's own way, launches included; None where there is none or it fails."""
    if not calls:
        return None
    try:
        return measure([torch.compile(call) for call in calls] if compiled else calls, device).median
    except Exception:  # whatever a compiler raises: then there is no figure to compare with
        return None


def time_problems(problems: list[Problem], device: torch.device) -> Timing:
    """Time of one run, over all sets of inputs in turn."""
    return measure([p.run for p in problems], device, graph=True)


def copies(
    case: KernelCase, scale: Scale, generator: torch.Generator, first: Problem, changes: Changes
) -> list[Problem]:
    """Enough problems of a case that their data exceed the L2 cache."""
    cache = torch.cuda.get_device_properties(scale.device).L2_cache_size
    count = min(MOST_COPIES, 1 + int(CACHES * cache // max(first.work.bytes, 1)))
    return [first, *(case.build(scale, generator, changes) for _ in range(max(1, count - 1)))]


def check(problem: Problem) -> Gate:
    """Run twice on poisoned outputs; compare with the reference, and the second run with the first."""
    problem.reset()
    reference = problem.reference()
    first, second = _run(problem), _run(problem)
    for name, got in first.items():
        if not torch.equal(got.nan_to_num(), second[name].nan_to_num()):
            return Gate(False, float("inf"), f"{name}: a second run gave other bits")
    error = 0.0
    for name, expected in reference.items():
        got = first[name]
        if not got.is_floating_point():
            if wrong := int((got.long() != expected.long()).sum()):
                return Gate(False, float("inf"), f"{name}: {wrong} of {got.numel()} integers differ")
        elif not torch.equal(got.isfinite(), expected.isfinite()):
            return Gate(False, float("inf"), f"{name}: not finite where the reference is, or the other way round")
        else:
            error = max(error, relative_error(got, expected))
        if error > problem.tolerance:
            return Gate(False, error, f"{name}: relative error {error:.2e} exceeds {problem.tolerance:.2e}")
    return Gate(True, error)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """||got - expected|| / ||expected|| in fp64, over finite entries."""
    finite = expected.isfinite()
    a, b = got[finite].double(), expected[finite].double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def _run(problem: Problem) -> Tensors:
    """Copies of the outputs after one run on poison."""
    problem.reset()
    for name, tensor in problem.outputs.items():
        if name in problem.starts:
            tensor.copy_(problem.starts[name])
        else:
            tensor.fill_(float("nan") if tensor.is_floating_point() else POISON_INT)
    problem.run()
    return {name: tensor.clone() for name, tensor in problem.outputs.items()}
