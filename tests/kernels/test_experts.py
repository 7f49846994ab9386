"""The grouped expert kernels against the reference on dequantised weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from redraft.config import QuantSpec
from redraft.kernels.experts import (
    ExpertBuffers,
    expert_rows,
    gemm_tiles,
    repack,
    run_experts,
    tile_rows,
)
from redraft.kernels.launch import INTERPRET
from redraft.kernels.slots import assign_slots, counts_scratch, empty_slots
from redraft.quant.rtn import quantize_experts
from redraft.random_model import PRESETS
from redraft.weights import DenseExperts, PackedExperts, nbytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = replace(
    PRESETS["26b-a4b"], hidden_size=256, moe_intermediate_size=128, num_experts=8, top_k_experts=2, num_heads=4
)
# Operands, the inner activation and the output are BF16 (relative rounding 2^-9 = 2e-3 each); the sum over K averages
# the first, so 4e-3 is their root of squares. The interpreter cuts to BF16 instead of rounding: twice that.
TOLERANCE = 8e-3 if INTERPRET.value else 4e-3


def _packed(config, spec, seed=0) -> PackedExperts:
    torch.manual_seed(seed)
    e, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    gate_up = torch.randn(e, 2 * inner, hidden) / hidden**0.5
    # Off-centre weights give every group another zero point.
    down = (torch.randn(e, hidden, inner) + torch.randn(e, hidden, 1)) / inner**0.5
    packed = quantize_experts(gate_up, down, spec)
    return PackedExperts(*(t.to(DEVICE) for t in vars(packed).values()))


def _routing(rows, config, kind) -> torch.Tensor:
    """Expert ids [rows, k], distinct in a row."""
    score = torch.rand(rows, config.num_experts)
    if kind == "one takes all":
        score[:, 3] = 2.0
        score[:, 5] = -1.0
    return score.topk(config.top_k_experts, dim=-1).indices.to(DEVICE)


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize(
    ("rows", "kind", "spec"),
    [
        (1, "spread", QuantSpec()),
        (17, "spread", QuantSpec()),
        (17, "one takes all", QuantSpec(64, 32)),
        (70, "one takes all", QuantSpec()),
    ],
)
def test_packed_rows(rows, kind, spec):
    packed = _packed(CONFIG, spec)
    x, index = torch.randn(rows, CONFIG.hidden_size).bfloat16().to(DEVICE), _routing(rows, CONFIG, kind)
    weights = torch.rand(rows, CONFIG.top_k_experts).to(DEVICE)
    expected = run_experts(x.float(), packed, weights, index)
    got = run_experts(x, repack(packed, CONFIG, spec), weights, index)
    assert _relative(got, expected) < TOLERANCE
    again = run_experts(x, repack(packed, CONFIG, spec), weights, index)
    assert torch.equal(got, again)


def test_every_slot_is_written_and_nothing_else_is_read():
    """Poisoned outputs come out finite, and poisoned rows of other tokens reach nobody."""
    spec, rows = QuantSpec(), 21
    packed = repack(_packed(CONFIG, spec), CONFIG, spec)
    x, index = torch.randn(rows, CONFIG.hidden_size).bfloat16().to(DEVICE), _routing(rows, CONFIG, "one takes all")
    height = tile_rows(rows, CONFIG.top_k_experts, CONFIG.num_experts)
    slots = empty_slots(rows, CONFIG.top_k_experts, CONFIG.num_experts, height, index.device)
    counts = counts_scratch(rows, CONFIG.top_k_experts, CONFIG.num_experts, index.device)
    assign_slots(index.int(), CONFIG.num_experts, height, **vars(slots), counts=counts)
    buffers = ExpertBuffers(rows * CONFIG.top_k_experts, CONFIG.hidden_size, 128, spec, index.device)
    x[7] = float("nan")
    for tensor in vars(buffers).values():
        tensor.fill_(float("nan"))
    sums = x.float().unflatten(1, (-1, spec.group_gate_up)).sum(dim=-1)
    out = expert_rows(x, sums, packed, slots, buffers, height)
    poisoned = slots.slot_of.view(rows, -1)[7].tolist()
    finite = out.isfinite().all(dim=1)
    assert [i for i in range(out.shape[0]) if not finite[i]] == sorted(poisoned)


def test_bf16_experts_behind_the_same_call():
    torch.manual_seed(1)
    dense = DenseExperts(torch.randn(8, 256, 256) / 16, torch.randn(8, 256, 128) / 11)
    dense = DenseExperts(dense.gate_up.bfloat16().to(DEVICE), dense.down.bfloat16().to(DEVICE))
    x, index = torch.randn(40, 256).bfloat16().to(DEVICE), _routing(40, CONFIG, "spread")
    slots = empty_slots(40, 2, 8, 32, index.device)
    assign_slots(index.int(), 8, 32, **vars(slots), counts=counts_scratch(40, 2, 8, index.device))
    out = expert_rows(x, x, dense, slots, None, 32)
    weights = torch.rand(40, 2, device=DEVICE)
    got = (out[slots.slot_of.long()].view(40, 2, -1) * weights[..., None]).sum(1)
    widened = DenseExperts(dense.gate_up.float(), dense.down.float())
    assert _relative(got, run_experts(x.float(), widened, weights, index)) < 4e-3


def test_repacking_moves_every_nibble_and_adds_no_byte():
    spec = QuantSpec()
    packed = _packed(CONFIG, spec)
    repacked = repack(packed, CONFIG, spec)
    assert nbytes(repacked) == nbytes(packed)
    # Expert 2, up row 9 (in the pair block 1, second half), k = 200: block 0, nibble 200 // 64, word 200 % 64.
    row = 128 + 9
    value = packed.gu_q[2, row, 100] & 15
    word = int(repacked.gate_up_words[2, 0, 0, 16 + 8 + 1, 200 % 64])
    assert (word >> (4 * (200 // 64))) & 15 == int(value)
    scale = int(repacked.gate_up_scales[2, 0, 1, 16 + 8 + 1]) & 0xFFFF
    assert scale == int(packed.gu_s[2, row, 1].view(torch.int16)) & 0xFFFF


def test_shapes_the_kernels_do_not_cover():
    assert gemm_tiles(CONFIG, QuantSpec(16, 8)) is None
    assert gemm_tiles(replace(CONFIG, moe_intermediate_size=96), QuantSpec(128, 64)) is None
    assert gemm_tiles(PRESETS["26b-a4b"], QuantSpec()) is not None


def test_tile_rows_follow_the_mean_per_expert():
    assert [tile_rows(256 * b, 8, 128) for b in (1, 2, 4, 8, 32)] == [32, 64, 128, 128, 128]
    assert tile_rows(1, 8, 128) == 32


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 255, 256, 257, 1024])
@pytest.mark.parametrize("kind", ["spread", "one takes all"])
def test_real_shapes(rows, kind):
    config, spec = PRESETS["26b-a4b"], QuantSpec()
    torch.manual_seed(rows)
    e, h, i = config.num_experts, config.hidden_size, config.moe_intermediate_size
    packed = PackedExperts(
        torch.randint(0, 256, (e, 2 * i, h // 2), dtype=torch.uint8, device=DEVICE),
        ((0.5 + torch.rand(e, 2 * i, h // 128, device=DEVICE)) / (4.6 * h**0.5)).half(),
        (7.5 + torch.randn(e, 2 * i, h // 128, device=DEVICE)).half(),
        torch.randint(0, 256, (e, h, i // 2), dtype=torch.uint8, device=DEVICE),
        ((0.5 + torch.rand(e, h, i // 64, device=DEVICE)) / (4.6 * i**0.5)).half(),
        (7.5 + torch.randn(e, h, i // 64, device=DEVICE)).half(),
    )
    x, index = torch.randn(rows, h, device=DEVICE).bfloat16(), _routing(rows, config, kind)
    weights = torch.rand(rows, 8, device=DEVICE)
    expected = run_experts(x.float(), packed, weights, index)
    repacked = repack(packed, config, spec)
    got = run_experts(x, repacked, weights, index)
    assert _relative(got, expected) < 4e-3
    assert torch.equal(got, run_experts(x, repacked, weights, index))
