"""Diffusion against autoregressive decoding: what is counted, what is timed, what is drawn."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import redraft
from redraft.bench import compare_ar as comparing
from redraft.bench.autoregressive import Routes
from redraft.bench.compare_ar import AUTOREGRESSIVE, OWN_STOP, Comparison, SizeResult, plot_comparison
from redraft.bench.roofline import Roofline, Work
from redraft.bench.work import (
    Shapes,
    autoregressive_work,
    denoise_passes,
    diffusion_work,
    encode_work,
    pass_work,
    step_work,
)  # fmt: skip
from redraft.config import QuantSpec
from redraft.engine.engine import Engine
from redraft.errors import MemoryShortage
from redraft.network.arena import KVArena
from redraft.store.random import PRESETS

LIMITS = Roofline(100.0, 0.5)
REAL = Shapes(PRESETS["26b-a4b"], QuantSpec(), 2)
TINY = Shapes(PRESETS["tiny"], QuantSpec(), 2)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return redraft.load("random:tiny", device="cpu")


def test_passes_of_a_batch() -> None:
    """Two requests of 2 and 3 passes on their first canvas; only the first has a second, of 1 pass."""
    prompts, steps = [10, 20], [[2, 1], [3]]
    assert denoise_passes(prompts, steps, 16, lockstep=False) == [[10, 20], [10, 20], [26, 20]]
    assert denoise_passes(prompts, steps, 16, lockstep=True) == [[10, 20], [10, 20], [20], [26]]


@pytest.mark.parametrize("lockstep", [False, True])
def test_work_of_diffusion(lockstep: bool) -> None:
    length, steps = TINY.config.canvas_length, [[2, 1], [2, 1]]
    passes = denoise_passes([10, 10], steps, length, lockstep)
    work = diffusion_work(TINY, passes, steps, lockstep)
    first, second = (Work.total(pass_work(TINY, 2, prefix).values()) for prefix in (10, 10 + length))
    commit = encode_work(TINY, length)
    assert len(passes) == 3
    assert work.flops == 2 * first.flops + second.flops + 2 * commit.flops
    assert work.bytes == 2 * first.bytes + second.bytes + (1 if lockstep else 2) * commit.bytes


def test_a_step_at_the_real_shapes() -> None:
    """By hand, one token after 1,024, W4: 8 of 128 experts in 30 layers, everything dense once, and the stored keys."""
    work = step_work(REAL, batch=1, prefix=1024, experts=8 * 30)
    experts = 8 * 30 * 3 * 2816 * 704 * (0.5 + 4 * (2 / 128 + 1 / 64) / 3)
    assert REAL.expert_bytes * 240 == pytest.approx(experts)
    assert replace(REAL, spec=None).expert_bytes == 3 * 2816 * 704 * 2
    dense = 30 * 3 * 2816 * 2112 * 2
    attention = 25 * 2816 * 256 * (32 + 16) * 2 + 5 * 2816 * 512 * (32 + 2) * 2
    keys = 25 * 2 * 1023 * 8 * 256 * 2 + 5 * 2 * 1024 * 2 * 512 * 2
    head = 262_144 * 2816 * 2
    assert work.bytes == pytest.approx(experts + dense + attention + keys + head, rel=0.02)
    products = 30 * 8 * 6 * 2816 * 704 + dense + attention + head + 30 * 2 * 128 * 2816
    scores = 25 * 4 * 16 * 256 * 1024 + 5 * 4 * 16 * 512 * 1025
    assert work.flops == pytest.approx(products + scores, rel=0.002)
    more = step_work(REAL, batch=1, prefix=1024, experts=8 * 30 + 10)
    assert more.bytes - work.bytes == pytest.approx(10 * REAL.expert_bytes)


def test_work_of_an_answer_is_that_of_its_steps() -> None:
    """Answers of 2 and 1 tokens to prompts of 9 and 5: a step of two rows over 8 and 4, and one of a row over 9."""
    passes = denoise_passes([9 - 1, 5 - 1], [[1, 1], [1]], 1, lockstep=False)
    work = autoregressive_work(TINY, passes, [7, 4])
    assert work == step_work(TINY, 2, 6, 7) + step_work(TINY, 1, 9, 4)


def test_experts_are_counted_from_their_routing(engine: Engine) -> None:
    """Against the routing of the very steps, and for a batch the union of its rows."""
    routes, prompts, answers = Routes(engine.model), [[5, 6, 7], [40] * 9], [[11, 12, 13], [200, 1]]
    singles = [routes.experts_per_step([p], [a]) for p, a in zip(prompts, answers, strict=True)]
    assert singles == [[4, 4, 4], [4, 4]]  # two of eight, in two layers
    together = routes.experts_per_step(prompts, answers)
    assert len(together) == 3 and together[2] == 4
    visits = [routes.visits(p, a) for p, a in zip(prompts, answers, strict=True)]
    both = torch.cat([chosen[:, :2] for chosen in visits], dim=-1).tolist()
    assert together[:2] == [sum(len(set(layer[step])) for layer in both) for step in range(2)]
    # One step alone routes like the pass over everything.
    arena = KVArena(engine.config, 1, 8, engine.dtype, engine.device)
    routes.encode(torch.tensor([prompts[0]]), arena)
    routes._chosen.clear()
    routes.encode(torch.tensor([[11]]), arena)
    chosen = torch.stack(routes._chosen)[:, 0]
    assert visits[0][:, 1].sort().values.tolist() == chosen.sort().values.tolist()


def _comparison(engine: Engine, sizes: tuple[int, ...], prompts: list[list[int]]) -> Comparison:
    settings = engine.settings.replace(max_new_tokens=20, eos_token_ids=(), max_denoising_steps=5)
    return Comparison(engine, LIMITS, prompts, sizes, fixed_passes=(2,), settings=settings, seed=3)


def test_the_comparison(engine: Engine) -> None:
    """Two canvases of 16 for 20 tokens; the same answers at every batch size; every figure from the counts."""
    seen: list[str] = []
    comparison = _comparison(engine, (1, 4), [list(range(10 + i, 30 + 2 * i)) for i in range(4)])
    results = list(comparison.run(seen.append))
    assert len(seen) == comparison.total == (4 + 3) * 3
    fixed_arm = "diffusion, 2 passes"
    assert seen[:6] == [AUTOREGRESSIVE, fixed_arm, OWN_STOP, fixed_arm, OWN_STOP, AUTOREGRESSIVE]
    one, four = (result.arms for result in results)
    for name in (AUTOREGRESSIVE, fixed_arm, OWN_STOP):
        alone = [answer for run in one[name] for answer in run.answers]
        assert [run.answers for run in four[name]] == [alone] * 3
        assert {len(answer) for answer in alone} == {20}
    figures = [result.to_dict()["arms"] for result in results]
    autoregressive, fixed, own = (figures[1][name] for name in (AUTOREGRESSIVE, fixed_arm, OWN_STOP))
    assert (autoregressive["tokens_per_forward"], autoregressive["passes"]) == (1.0, 3 * 20)
    assert (fixed["tokens_per_forward"], fixed["passes"]) == (5.0, 3 * 4)
    tokens = sum(token != 0 for run in four[OWN_STOP] for answer in run.answers for token in answer)
    assert 3 * 4 * 20 > tokens > 3 * 4 * 18, "noise has padding in it, which is not counted"
    assert (own["tokens_per_forward"], own["passes"]) == (tokens / (3 * 4 * 10), 3 * 10)
    assert 2 < autoregressive["experts_per_layer"] <= 8 and figures[0][AUTOREGRESSIVE]["experts_per_layer"] == 2
    assert own["experts_per_layer"] is None
    work = four[AUTOREGRESSIVE][0].work
    seconds = sum(run.seconds for run in four[AUTOREGRESSIVE])
    assert autoregressive["tokens_per_second"] == pytest.approx(3 * 4 * 20 / seconds)
    assert autoregressive["ms_per_token"] == pytest.approx(1e3 * seconds / 3 / 20)
    assert autoregressive["bytes_per_token"] == pytest.approx(work.bytes / 80)
    decoding = seconds - sum(results[1].prompt_seconds)
    assert autoregressive["gbps"] == pytest.approx(3 * work.bytes / decoding / 1e9)
    assert autoregressive["share_of_bandwidth"] == pytest.approx(autoregressive["gbps"] / 100)
    assert autoregressive["share_of_matmul"] == pytest.approx(autoregressive["tflops"] / 0.5)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory.\nTried"), MemoryShortage("needs 9 GiB")])
def test_sizes_until_memory_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    decoder = Comparison._decoder

    def limited(comparison: Comparison, size: int) -> Any:
        if size > 1:
            raise error
        return decoder(comparison, size)

    monkeypatch.setattr(Comparison, "_decoder", limited)
    rows = [result.to_dict() for result in _comparison(engine, (1, 2, 4), [[5, 6]] * 4).run(print)]
    assert [row["batch"] for row in rows] == [1, 2]
    assert rows[1] == {"batch": 2, "error": "needs 9 GiB" if "needs" in str(error) else "out of memory"}


def test_plot(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(comparing, "LEAST_BATCHES", 1)
    results = list(_comparison(engine, (1, 2), [[5, 6]] * 2).run(print))
    results.append(SizeResult(4, engine.config, LIMITS, error="out of memory"))
    plot_comparison(tmp_path / "scaling.png", results, LIMITS, "a test")
    assert [p.name for p in tmp_path.iterdir()] == ["scaling.png"]
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


@pytest.mark.gpu
def test_the_comparison_on_fused_passes() -> None:
    """Graphs, shared slots and batches of several sizes on a GPU: the same counts as on a CPU."""
    engine = redraft.load("random:demo", device="cuda")
    assert engine.fused is not None
    settings = engine.settings.replace(max_new_tokens=100, eos_token_ids=(), max_denoising_steps=6)
    prompts = torch.randint(1280, (16, 70), generator=torch.Generator().manual_seed(0)).tolist()
    results = list(Comparison(engine, LIMITS, prompts, (1, 2, 4, 8, 16), (3,), settings, seed=0).run(print))
    assert [result.error for result in results] == [None] * 5
    for result in results:
        arms = result.to_dict()["arms"]
        assert arms[AUTOREGRESSIVE]["tokens_per_forward"] == pytest.approx(1, abs=0.02)  # a pad token now and then
        assert arms[AUTOREGRESSIVE]["tokens_per_answer"] == pytest.approx(100, abs=2)
        assert arms["diffusion, 3 passes"]["passes"] == 6 * len(result.arms["diffusion, 3 passes"])
        assert arms[OWN_STOP]["passes"] == 12 * len(result.arms[OWN_STOP])
        assert all(arm["ms_per_pass"] > 0 for arm in arms.values())
