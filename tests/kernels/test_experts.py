"""The grouped expert kernels against the reference on dequantised weights."""

from dataclasses import replace

import pytest
import torch
from tolerance import DEVICE, gaussian, relative

from redraft.config import QuantSpec
from redraft.kernels.experts import expert_buffers, expert_products, expert_rows, prepare_rows, run_experts
from redraft.kernels.experts_hopper import LARGE, SMALL, hopper_products, why_not
from redraft.kernels.experts_layout import TILE_ROWS, gemm_tiles, repack, unpack_layer
from redraft.kernels.launch import INTERPRET
from redraft.kernels.slots import assign_slots, counts_scratch, empty_slots
from redraft.network.weights import DenseExperts, PackedExperts, nbytes
from redraft.quant.rtn import quantize_experts
from redraft.store.random import PRESETS

SPEC, REAL = QuantSpec(), PRESETS["26b-a4b"]
CONFIG = replace(REAL, hidden_size=256, moe_intermediate_size=128, num_experts=8, top_k_experts=2, num_heads=4)
# Operands, the inner activation and the output are BF16 (relative rounding 2^-9 = 2e-3 each); the sum over K averages
# the first, so 4e-3 is their root of squares. The interpreter cuts to BF16 instead of rounding: twice that.
TOLERANCE = 8e-3 if INTERPRET.value else 4e-3


def _packed(spec=SPEC) -> PackedExperts:
    e, hidden, inner = CONFIG.num_experts, CONFIG.hidden_size, CONFIG.moe_intermediate_size
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


@pytest.mark.parametrize("tile", [SMALL, LARGE])
def test_warpgroups_exchange_no_more_registers_than_a_block_has(tile):
    """Otherwise the last warpgroup to ask would wait for ever."""
    at_launch = 65536 // tile.threads // 8 * 8
    exchanged = tile.producer_registers + tile.warpgroups * tile.consumer_registers
    assert exchanged <= (tile.warpgroups + 1) * at_launch


@pytest.mark.parametrize(
    ("rows", "kind", "spec"),
    [
        (1, "spread", SPEC),
        (17, "spread", SPEC),
        (17, "one takes all", QuantSpec(64, 32)),
        (70, "one takes all", SPEC),
    ],
)
def test_packed_rows(rows, kind, spec):
    packed, x, index = _packed(spec), gaussian(rows, CONFIG.hidden_size), _routing(rows, CONFIG, kind)
    weights = torch.rand(rows, CONFIG.top_k_experts).to(DEVICE)
    got, again = (run_experts(x, repack(packed, CONFIG, spec), weights, index) for _ in range(2))
    assert relative(got, run_experts(x.float(), packed, weights, index)) < TOLERANCE
    assert torch.equal(got, again)


def _assigned(index, num_experts, tile=TILE_ROWS):
    rows, top_k = index.shape
    slots = empty_slots(rows, top_k, num_experts, tile, index.device)
    counts = counts_scratch(rows, top_k, num_experts, index.device)
    assign_slots(index.int(), num_experts, tile, **vars(slots), counts=counts)
    return slots


def _slot_outputs(x, experts, index, config, *, hopper):
    """Expert outputs by slot from buffers full of NaN, and the slots."""
    width = config.moe_intermediate_size
    products = expert_products(x.shape[1], width, SPEC, x.device) if hopper else None
    buffers = expert_buffers(*index.shape, config.num_experts, x.shape[1], width, SPEC, x.device, products)
    slots = _assigned(index, config.num_experts, buffers.tile_rows)
    for tensor in vars(buffers).values():
        if isinstance(tensor, torch.Tensor) and tensor.dtype != torch.int32:
            tensor.fill_(255 if tensor.dtype == torch.uint8 else float("nan"))  # 255 is NaN in e4m3
    sums = x.float().unflatten(1, (-1, SPEC.group_gate_up)).sum(dim=-1)
    prepare_rows(x, buffers)
    return expert_rows(x, sums, experts, slots, buffers), slots


def _combined(out, slots, weights):
    """Every row's sum over its experts."""
    return (out[slots.slot_of.long()].view(*weights.shape, -1) * weights[..., None]).sum(1)


@pytest.mark.parametrize("hopper", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_every_slot_is_written_and_nothing_else_is_read(hopper):
    """Poisoned outputs come out finite, and poisoned rows of other tokens reach nobody."""
    rows, packed = 21, repack(_packed(), CONFIG, SPEC)
    x, index = gaussian(rows, CONFIG.hidden_size), _routing(rows, CONFIG, "one takes all")
    x[7], x[9, 5] = float("nan"), float("inf")
    out, slots = _slot_outputs(x, packed, index, CONFIG, hopper=hopper)
    poisoned = slots.slot_of.view(rows, -1)[[7, 9]].flatten().tolist()
    finite = out.isfinite().all(dim=1)
    assert [i for i in range(out.shape[0]) if not finite[i]] == sorted(poisoned)


def test_bf16_experts_behind_the_same_call():
    dense = DenseExperts(gaussian(8, 256, 256, scale=1 / 16), gaussian(8, 256, 128, scale=1 / 11))
    x, index, weights = gaussian(40, 256), _routing(40, CONFIG, "spread"), torch.rand(40, 2, device=DEVICE)
    slots = _assigned(index, 8)
    got = _combined(expert_rows(x, x, dense, slots, None), slots, weights)
    widened = DenseExperts(dense.gate_up.float(), dense.down.float())
    assert relative(got, run_experts(x.float(), widened, weights, index)) < 4e-3


def test_repacking_moves_every_nibble_and_adds_no_byte():
    packed = _packed()
    repacked = repack(packed, CONFIG, SPEC)
    assert nbytes(repacked) == nbytes(packed)
    # Expert 2, up row 9 (in the pair block 1, second half), k = 200: block 1, nibble 72 // 32, word 72 % 32 = 8, the
    # first of piece 1, which row 25 of a tile keeps in place 1 ^ (25 // 2) % 4. Tile 0 of 2 has every other block.
    row = 128 + 9
    value = packed.gu_q[2, row, 100] & 15
    words, scales = repacked.gate_up[2, 2].split([128 * 64, 128 * 4])
    word = int(words.view(torch.int16).view(128, 32)[16 + 8 + 1, 8 * (1 ^ 0)])
    assert (word >> (4 * 2)) & 15 == int(value)
    scale = int(scales.view(torch.int32)[16 + 8 + 1]) & 0xFFFF
    assert scale == int(packed.gu_s[2, row, 1].view(torch.int16)) & 0xFFFF
    back = unpack_layer(repacked, CONFIG)
    assert all(torch.equal(a, b) for a, b in zip(vars(back).values(), vars(packed).values(), strict=True))


def test_shapes_the_kernels_do_not_cover():
    assert gemm_tiles(CONFIG, QuantSpec(16, 8)) is None
    assert gemm_tiles(replace(CONFIG, moe_intermediate_size=96), QuantSpec(128, 64)) is None
    assert gemm_tiles(REAL, SPEC) is not None


def test_what_keeps_the_hopper_products_away():
    cpu = torch.device("cpu")
    assert hopper_products(2816, 704, SPEC, cpu) is None
    assert why_not(2816, 704, SPEC, cpu) == "needs a Hopper GPU (compute capability 9.0)"


def _real_layer(hopper):
    """Random packed experts; skips the test when it needs a GPU of another kind."""
    h, i = REAL.hidden_size, REAL.moe_intermediate_size
    tensors = []
    for rows, width, group in ((2 * i, h, SPEC.group_gate_up), (h, i, SPEC.group_down)):
        shape = (REAL.num_experts, rows, width // group)
        nibbles = torch.randint(0, 256, (REAL.num_experts, rows, width // 2), dtype=torch.uint8, device=DEVICE)
        scales = ((0.5 + torch.rand(shape, device=DEVICE)) / (4.6 * width**0.5)).half()
        tensors += [nibbles, scales, (7.5 + torch.randn(shape, device=DEVICE)).half()]
    if hopper and hopper_products(h, i, SPEC, tensors[0].device) is None:
        pytest.skip("no Hopper GPU")
    return PackedExperts(*tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("kind", ["spread", "one takes all"])
def test_real_shapes(kind, hopper):
    """Against the fp32 reference by slot, at every number of rows; twice the same bits."""
    packed = _real_layer(hopper)
    experts = repack(packed, REAL, SPEC)
    for rows in (1, 17, 255, 256, 257, 1024):
        x, index, weights = gaussian(rows, 2816), _routing(rows, REAL, kind), torch.rand(rows, 8, device=DEVICE)
        expected = run_experts(x.float(), packed, weights, index)
        (out, slots), (again, _) = (_slot_outputs(x, experts, index, REAL, hopper=hopper) for _ in range(2))
        assert relative(_combined(out, slots, weights), expected) < 4e-3, rows
        assert torch.equal(out, again), rows


@pytest.mark.gpu
@pytest.mark.parametrize("hopper", [True, False])
def test_a_row_gives_the_same_bits_beside_any_number_of_others(hopper):
    """In tiles of 1 to 64 rows, and wherever in its tile it comes to stand."""
    experts, x = repack(_real_layer(hopper=hopper), REAL, SPEC), gaussian(4096, 2816)
    index = torch.cat([_routing(2048, REAL, kind) for kind in ("spread", "one takes all")])
    alone = None
    for rows in (256, 512, 768, 1024, 2048, 4096):
        out, slots = _slot_outputs(x[:rows], experts, index[:rows].contiguous(), REAL, hopper=hopper)
        mine = out[slots.slot_of.long()].view(rows, 8, -1)[:256]
        alone = mine if alone is None else alone
        assert torch.equal(mine, alone), rows


@pytest.mark.gpu
def test_hopper_products_keep_sixteen_bit_activations():
    """Values far below their group's largest keep their digits, and no magnitude of the input overflows."""
    packed, rows = _real_layer(hopper=True), 64
    x, index, weights = gaussian(rows, 2816), _routing(rows, REAL, "spread"), torch.rand(rows, 8, device=DEVICE)
    x[:, ::128] *= 2.0**10  # one large value a group
    experts = repack(packed, REAL, SPEC)
    for scale in (1.0, 2.0**-30, 2.0**30):
        got = _combined(*_slot_outputs(x * scale, experts, index, REAL, hopper=True), weights)
        assert got.isfinite().all()
        assert relative(got, run_experts((x * scale).float(), packed, weights, index)) < 4e-3, scale
