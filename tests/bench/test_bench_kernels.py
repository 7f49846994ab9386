"""The gate, and every case through it."""

import dataclasses
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch

from redraft.bench import kernels
from redraft.bench.cases.case import KernelCase, Problem, Scale
from redraft.bench.kernels import bench_kernels, check, load_cases, scale_for, select_cases
from redraft.bench.roofline import Roofline, Work
from redraft.config import QuantSpec
from redraft.errors import RedraftError, UsageError
from redraft.kernels import launch
from redraft.store.random import PRESETS

SMALL = Scale(dataclasses.replace(PRESETS["tiny"], canvas_length=3), QuantSpec(), 2, 7, torch.device("cpu"))
CASES = {case.name: case for case in load_cases()}


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_kernel_passes_its_gate(name: str) -> None:
    """Through the interpreter without a GPU: two slots of 3 rows, 7 committed positions."""
    scale = SMALL if not torch.cuda.is_available() else scale_for(torch.device("cuda"))
    problem = CASES[name].build(scale, torch.Generator(scale.device).manual_seed(0), {})
    gate = check(problem)
    assert gate.passed, gate.reason
    assert problem.work.bytes > 0
    if problem.stock is not None:
        problem.stock()


@pytest.mark.parametrize("name", sorted(n for n, c in CASES.items() if c.candidates))
def test_candidates_are_settings_of_the_kernel(name: str) -> None:
    """Each builds and launches; whether it is right at the real shapes is for the tuner to find out."""
    case = CASES[name]
    case.build(SMALL, torch.Generator("cpu").manual_seed(0), case.candidates[0]).run()


def test_every_file_of_kernels_with_a_launch_has_a_case() -> None:
    assert {name.split(".")[0] for name in CASES} >= {
        "acceptance", "attention", "experts", "kv_write", "mlp", "norms", "rope", "router", "sampling",
        "self_conditioning", "slots",
    }  # fmt: skip
    assert [case.name for case in load_cases()] == sorted(CASES)


def copying(mistake: Callable[[torch.Tensor, int], object] = lambda out, run: None) -> Problem:
    """A kernel that copies, and then makes a mistake in its n-th run."""
    x, out = torch.randn(64), torch.empty(64)
    ids, out_ids = torch.arange(4), torch.empty(4, dtype=torch.int64)
    runs = iter(range(100))

    def run() -> None:
        out.copy_(x)
        out_ids.copy_(ids)
        mistake(out, next(runs))

    outputs = {"out": out, "ids": out_ids}
    return Problem(run, outputs, lambda: {"out": x.double(), "ids": ids}, Work(1, 1), tolerance=1e-3)


def one_output(run: Callable[[torch.Tensor], object], expected: torch.Tensor, **more: object) -> Problem:
    """A kernel that writes `out`, of the size and type of what is expected of it."""
    out = torch.zeros_like(expected)
    return Problem(lambda: run(out), {"out": out}, lambda: {"out": expected.clone()}, Work(1, 1), 0.0, **more)


def test_right_kernels_pass() -> None:
    gate = check(copying())
    assert (gate.passed, gate.error, gate.reason) == (True, 0.0, "")
    assert check(copying(lambda out, run: out.mul_(1.0005))).passed
    infinite = torch.tensor([1.0, -float("inf"), 2.0])  # infinities where they belong
    assert check(one_output(lambda out: out.copy_(infinite), infinite)).passed
    # Inputs that are written are restored before every run.
    assert check(one_output(lambda out: out.add_(1), torch.full((4,), 2.0), starts={"out": torch.ones(4)})).passed


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (copying(lambda out, run: out.mul_(1.01)), "out: relative error 1.00e-02 exceeds 1.00e-03"),
        (copying(lambda out, run: out[3:4].fill_(float("nan"))), "out: not finite where the reference is"),
        (copying(lambda out, run: out[3:4].fill_(float("inf"))), "out: not finite where the reference is"),
        (copying(lambda out, run: out.mul_(1 + 1e-6 * run)), "out: a second run gave other bits"),
        (one_output(lambda out: None, torch.zeros(8)), "out: not finite"),  # left unwritten
        (one_output(lambda out: None, torch.zeros(8, dtype=torch.int32)), "out: 8 of 8 integers differ"),
    ],
)
def test_wrong_kernels_fail(problem: Problem, reason: str) -> None:
    gate = check(problem)
    assert not gate.passed and reason in gate.reason


def case(built: Problem | Exception) -> KernelCase:
    return KernelCase("test", Mock(side_effect=[built]))


def test_speed_is_reported_only_behind_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pretended GPU whose clock always says 2 ms: the wrong kernel is never timed."""
    measure = Mock(return_value=kernels.Timing(2.0, 1.0, 3.0, 5, True))
    monkeypatch.setattr(kernels, "measure", measure)
    monkeypatch.setattr(kernels, "copies", lambda case, scale, generator, first, changes: [first])
    monkeypatch.setattr(torch, "Generator", lambda device: torch._C.Generator("cpu"))
    gpu = dataclasses.replace(SMALL, device=torch.device("cuda"))
    wrong = copying(lambda out, run: out.zero_())
    good, bad, broken = bench_kernels([case(copying()), case(wrong), case(RuntimeError("no\nroom"))], gpu)
    assert measure.call_count == 1 and good.timing is not None
    row = good.to_dict(Roofline(1.0, 1.0))
    assert (row["passed"], row["us"], row["torch_us"]) == (True, 2000.0, None)
    assert bad.measured(Roofline(1.0, 1.0)) is None and "us" not in bad.to_dict(Roofline(1.0, 1.0))
    assert (broken.gate.passed, broken.gate.reason) == (False, "RuntimeError: no")
    (result,) = bench_kernels([case(copying())], SMALL)  # without a GPU only the gate runs
    assert result == kernels.KernelResult("test", kernels.Gate(True, 0.0), 1e-3)


def test_choosing_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {c.name.split(".")[0] for c in select_cases("norms")} == {"norms"}
    assert len(select_cases(None)) == len(CASES)
    with pytest.raises(UsageError, match=r"no kernel is called like 'zzz'; there are acceptance, "):
        select_cases("zzz")
    monkeypatch.setattr(launch, "HAS_TRITON", False)
    with pytest.raises(RedraftError, match="the kernels need Triton"):
        select_cases(None)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(CASES))
def test_times_at_the_real_shapes(name: str) -> None:
    (result,) = bench_kernels([CASES[name]], scale_for(torch.device("cuda")))
    assert result.gate.passed, result.gate.reason
    assert result.timing is not None and result.timing.graph
