"""Passes by part, rivals, batches and profiles, on tiny models on the CPU."""

import dataclasses
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import redraft
from redraft.bench import batch as batching
from redraft.bench import step as stepping
from redraft.bench.passes import FusedStep, ReferenceStep
from redraft.bench.probe import Probe
from redraft.bench.profile import Bound, amdahl, device_activity, summarise
from redraft.bench.rivals import build_model, parse_rivals, rivals, transformers_config
from redraft.bench.roofline import Measured, Work
from redraft.bench.step import OURS, StepResult, bench_step, open_step
from redraft.bench.timing import Timing
from redraft.bench.work import PARTS, Shapes, expert_spec, pass_work
from redraft.config import ModelConfig, QuantSpec
from redraft.engine.engine import Engine
from redraft.errors import MemoryShortage, UsageError
from redraft.kernels.norms import rms_norm
from redraft.network.fused import FusedModel
from redraft.store.random import PRESETS

LIMITS = Probe("test", 100.0, 90.0, {"float32": 0.5}, 1.0, None, "float32")


def bench(engine: Engine, **changes: Any) -> StepResult:
    """The shortest run of bench_step."""
    return bench_step(engine, LIMITS, **{"prompt_tokens": 8, "batch": 1, "passes": 1, "rounds": 1, **changes})


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "PARTS_SECONDS", 0.0)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return redraft.load("random:tiny", device="cpu")


def test_the_parts_are_a_pass(engine: Engine) -> None:
    """Chained by hand, the closures' operations give the pass's own logits: what is timed is what runs."""
    step = open_step(engine, 2, 20)
    assert isinstance(step, ReferenceStep)
    model, rows = engine.model, step.rows
    conditioned = rows.self_conditioning
    expected = model.denoise(rows.canvas, step.arena, conditioned)
    parts = step.parts()
    assert tuple(parts) == PARTS
    x = parts["embed"]()
    assert torch.equal(parts["self-conditioning"](), model._self_condition(x, conditioned))
    hidden = rms_norm(x, model.weights.norm, engine.config.rms_norm_eps)
    assert torch.equal(parts["head"](), model.head(hidden))
    for call in parts.values():
        call()
    assert torch.equal(model.denoise(rows.canvas, step.arena, conditioned), expected) is False  # it sampled
    assert step.arena.length == 20


def test_passes_go_on_forever_and_encoding_leaves_them_alone(engine: Engine) -> None:
    step = open_step(engine, 1, 8)
    assert isinstance(step, ReferenceStep)
    before = int(step.rows.state.step)
    for _ in range(60):  # more than the 48 passes of a generation
        step.run_pass()
    step.run_encode()
    assert int(step.rows.state.step) == before + 60 and not bool(step.rows.state.done.any())
    assert step.rows.canvas.shape == (1, 16) and step.arena.length == 8
    with pytest.raises(UsageError, match="exceeds the context of 4096"):
        open_step(engine, 1, 4090)


@pytest.mark.parametrize(
    ("weights", "spec", "expected"),
    [("w4", None, QuantSpec()), ("w4", QuantSpec(32, 16), QuantSpec(32, 16)), ("bf16", None, None)],
)
def test_group_sizes_are_seen_in_the_weights(weights: str, spec: QuantSpec | None, expected: QuantSpec | None) -> None:
    assert expert_spec(redraft.load("random:tiny", weights=weights, spec=spec, device="cpu")) == expected


def test_bench_step(engine: Engine) -> None:
    result = bench(engine, prompt_tokens=16, passes=2, rounds=2)
    assert tuple(result.parts) == PARTS
    assert result.gaps_ms == pytest.approx(result.pass_ms - sum(part.ms for part in result.parts.values()))
    report = result.to_dict()
    assert report["ms_per_pass"] == report["arms"][OURS]["ms"] > 0
    assert report["arms"][OURS]["implementation"] == "reference"
    head = report["parts"]["head"]
    assert head["gbps"] == pytest.approx(head["bytes"] / head["ms"] / 1e6)
    assert head["share_of_roofline"] == pytest.approx(head["floor_ms"] / head["ms"])
    assert report["total"]["bytes"] == sum(part["bytes"] for part in report["parts"].values())
    assert report["encode"]["ms"] > 0 and report["peak_bytes"] > report["weight_bytes"]
    only_timed = {"ms", "ms_low", "ms_high", "runs", "share_of_pass"}
    assert result.total.ms == result.pass_ms and set(report["total"]) == set(head) - only_timed


def test_every_pass_is_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another implementation, whose parts do nothing: warm-up, then `rounds` of `passes`; its work is a pass's."""

    mine = Mock(capturable=False, parts=lambda: dict.fromkeys(PARTS, lambda: None))
    mine.name = "fused"
    monkeypatch.setattr(stepping, "open_step", lambda engine, batch, prompt_tokens, slots: mine)
    result = bench(engine, prompt_tokens=16, passes=3, rounds=2)
    assert mine.run_pass.call_count == 3 + 2 * 3 and result.details[OURS]["implementation"] == "fused"
    assert {name: part.work for name, part in result.parts.items()} == pass_work(Shapes.of(engine), 1, 16)


def test_the_fused_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the interpreter without a GPU, on canvases of 2: which tier runs what, and each part as a launch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setitem(PRESETS, "short", dataclasses.replace(PRESETS["tiny"], canvas_length=2))
    short = redraft.load("random:short", dtype=torch.bfloat16, device=str(device))
    short.fused = short.fused or FusedModel(short.config, short.model.weights, QuantSpec())
    step = open_step(short, 1, 3)
    assert isinstance(step, FusedStep) and step.capturable and expert_spec(short) == QuantSpec()
    assert step.runner.state.step.tolist() == [1] and step.runner.arena.length.tolist() == [3]
    parts = step.parts()
    assert tuple(parts) == PARTS
    for call in parts.values():
        call()
    work, state = step.runner.work.passes[1], step.runner.state
    assert all(bool(t.isfinite().all()) for t in (work.rows.x, work.rows.next_in, work.rows.delta, work.logits))
    assert (state.step.tolist(), state.done.tolist()) == ([2], [0])  # the sampling finished a pass and stopped nothing
    short.tier = "off"
    assert isinstance(open_step(short, 1, 3), ReferenceStep)


@pytest.mark.parametrize("name", ["tiny", "demo", "26b-a4b"])
def test_the_rival_has_our_shapes(name: str) -> None:
    """Read back the way a checkpoint of transformers is: the same ModelConfig, but for what random weights ignore."""
    assert ModelConfig.from_dict(transformers_config(PRESETS[name]).to_dict()) == PRESETS[name]


def test_transformers_beside_ours(engine: Engine) -> None:
    assert parse_rivals(None) == [] and parse_rivals("transformers, transformers") == ["transformers"]
    with pytest.raises(UsageError, match="--vs is 'vllm', expected one of transformers, transformers-compiled"):
        parse_rivals("transformers,vllm")
    result = bench(engine, passes=2, rounds=2, rivals=rivals(["transformers"], engine, 1, 8))
    other = result.to_dict()["arms"]["transformers"]
    assert other["implementation"].startswith("transformers 5.") and "encode_and_setup_ms" in other
    assert set(result.arms) == {OURS, "transformers"}
    model = build_model(engine.config, torch.bfloat16, torch.device("cpu"))
    assert torch.get_default_dtype() == torch.float32  # building one leaves torch as it was
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_rival_that_fails_costs_nothing_else(engine: Engine) -> None:
    said: list[str] = []
    result = bench(engine, rivals={"other": Mock(side_effect=RuntimeError("no\ncompiler"))}, progress=said.append)
    assert "other" in said[0] and said[1] == "timing passes of redraft" and len(said) == 3
    assert result.failed == {"other": "RuntimeError: no compiler"} and set(result.arms) == {OURS}
    assert result.to_dict()["failed"] == result.failed


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryShortage("needs 9 GiB")])
def test_batches_until_memory_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def limited(engine: Engine, size: int, prompt_tokens: int):
        if size > 2:
            raise error
        return open_step(engine, size, prompt_tokens)

    monkeypatch.setattr(batching, "open_step", limited)
    results = batching.bench_batch(engine, LIMITS, prompt_tokens=8, sizes=(1, 2, 4, 8), passes=1, rounds=2)
    rows = [result.to_dict() for result in results]
    assert [row["canvases"] for row in rows] == [1, 2, 4]
    assert rows[1]["ms_per_pass_and_canvas"] == rows[1]["ms_per_pass"] / 2
    assert rows[2] == {"canvases": 4, "error": "out of memory"}


def test_overlapping_operations_are_busy_once() -> None:
    spans = [("gemm", 0.0, 10.0), ("copy", 5.0, 8.0), ("gemm", 8.0, 20.0), ("copy", 30.0, 40.0)]
    activity = summarise(spans, passes=2)
    assert (activity.busy_ms, activity.count) == (pytest.approx(30 / 2 / 1e3), 2)
    assert [(o.name, o.count, o.ms) for o in activity.operations] == [("gemm", 1.0, 0.011), ("copy", 1.0, 0.0065)]


def test_amdahls_bound() -> None:
    def took(ms: float) -> Measured:
        return Measured(Work(1, 1), Timing.of([ms]), LIMITS.roofline)

    parts = {name: took(5.0 if name == "experts" else 0.5) for name in PARTS}
    bounds = amdahl(StepResult({OURS: Timing.of([10.0])}, {}, {}, parts, took(1.0), 0, 0))
    assert bounds[0] == Bound("experts", 5.0, 5.0, 2.0)
    assert next(b for b in bounds if b.name == "gaps") == Bound("gaps", 1.0, 9.0, 10 / 9)
    assert len(bounds) == len(PARTS) + 1


@pytest.mark.gpu
def test_profile_on_a_gpu() -> None:
    engine = redraft.load("random:demo", device="cuda")
    activity = device_activity(open_step(engine, 1, 64), engine.device)
    assert activity is not None and activity.busy_ms > 0 and activity.operations
