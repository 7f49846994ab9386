"""Routed experts: y[t] = sum over slots k of w[t, k] * down_e(gelu(gate_e(x[t])) * up_e(x[t])), e = experts[t, k].

The sum runs over a token's slots in their routed order, never in order of arrival, so it is the same from run to run.

`run_experts` is the specification: plain torch, packed experts dequantised one at a time, so that the BF16 experts of a
layer never exist together. On a GPU, packed experts are first put into the layout of the kernels (`repack`), and two
grouped matrix products run per layer:

* Rows that visit the same expert stand next to each other ("slots", `kernels/slots.py`) and are cut into tiles.
* Weights are the left operand of the tensor cores. One 16-bit word holds four nibbles of one weight row; masking a
  nibble into the low mantissa bits of the BF16 number 128 gives 128 + q exactly, without an integer conversion.
* Scale and zero act on the accumulator, once per group: acc += s * dot(128 + q, x) - s * (128 + z) * sum(x).
* Gate and up rows alternate in blocks of 8, so both halves of a pair sit in one thread: the activation moves no data.
  A gate/up tile covers one group of the down projection and writes the sums that its zero points need.

On Hopper the same two products run in CUDA C++ (`experts_hopper.py`), on the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from redraft.config import QuantSpec
from redraft.kernels.experts_hopper import HopperBuffers, HopperProducts, hopper_products
from redraft.kernels.experts_layout import READ_TILES, TILE_ROWS, product_tiles, repack_width
from redraft.kernels.launch import INTERPRET, dot, rounded, tl, triton
from redraft.kernels.mlp import gated
from redraft.kernels.packing import dequantize
from redraft.kernels.products import ROW_MULTIPLE, linear
from redraft.kernels.slots import Slots, assign_slots, counts_scratch, empty_slots
from redraft.kernels.tables import LaunchSettings, run
from redraft.kernels.weights import DenseExperts, PackedExperts, RepackedExperts

Experts = DenseExperts | PackedExperts | RepackedExperts


def run_experts(
    x: torch.Tensor, experts: Experts, weights: torch.Tensor, index: torch.Tensor, batch_invariant: bool = False
) -> torch.Tensor:
    """x [T, H], routing weights fp32 [T, k], expert ids int64 [T, k] -> [T, H] in x's dtype.

    batch_invariant: on a CPU a token's bits do not depend on the other tokens.
    """
    if isinstance(experts, RepackedExperts):
        return _run_repacked(x, experts, weights, index)
    tokens, top_k = index.shape
    order = index.flatten().argsort(stable=True)
    counts = torch.bincount(index.flatten(), minlength=_num_experts(experts)).tolist()
    slots = x.new_empty(tokens * top_k, x.shape[-1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = order[start : start + count]
            filled = F.pad(rows // top_k, (0, -count % ROW_MULTIPLE)) if batch_invariant else rows // top_k
            slots[rows] = _expert(x[filled], experts, expert, batch_invariant)[:count]
            start += count
    weighted = slots * weights.flatten()[:, None]
    return weighted.view(tokens, top_k, -1).sum(dim=1).to(x.dtype)


def _num_experts(experts: DenseExperts | PackedExperts) -> int:
    return experts.down.shape[0] if isinstance(experts, DenseExperts) else experts.dn_q.shape[0]


def _expert(x: torch.Tensor, experts: DenseExperts | PackedExperts, e: int, batch_invariant: bool) -> torch.Tensor:
    if isinstance(experts, DenseExperts):
        gate_up, down = experts.gate_up[e], experts.down[e]
    else:
        gate_up = dequantize(experts.gu_q[e], experts.gu_s[e], experts.gu_z[e], x.dtype)
        down = dequantize(experts.dn_q[e], experts.dn_s[e], experts.dn_z[e], x.dtype)
    gate, up = linear(x, gate_up, batch_invariant).chunk(2, dim=-1)
    return linear(gated(gate, up, batch_invariant=batch_invariant), down, batch_invariant)


READ = tl.constexpr(READ_TILES)


@triton.jit
def _unpack(words):
    """int16 words -> four BF16 tiles 128 + q, nibble 0 to 3."""
    if INTERPRET:
        a0 = ((words & 15) | 0x4300).to(tl.bfloat16, bitcast=True)
        a1 = (((words >> 4) & 15) | 0x4300).to(tl.bfloat16, bitcast=True)
        a2 = (((words >> 8) & 15) | 0x4300).to(tl.bfloat16, bitcast=True)
        a3 = (((words >> 12) & 15) | 0x4300).to(tl.bfloat16, bitcast=True)
        return a0, a1, a2, a3
    # Two words at a time: one shift and one three-input logic operation per pair of weights.
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b, c;
        shr.u32 a, $4, 4; shr.u32 b, $4, 8; shr.u32 c, $4, 12;
        lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 $1, a, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 $2, b, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 $3, c, 0x000f000f, 0x43004300, 0xea; }""",
        "=r,=r,=r,=r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _add_group(acc, weights, x, x_sums, scales):
    """acc += s * dot(128 + q, x) - s * (128 + z) * sum(x). Two statements, so that each is one fused multiply-add."""
    product = dot(weights, x)
    scale = (scales & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    zero = ((scales >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    acc += scale[:, None] * product
    acc += (-scale * (zero + 128.0))[:, None] * x_sums[None, :]
    return acc


@triton.jit
def _accumulate(
    x_rows, valid, sum_rows, words_ptr, scales_ptr, expert, tile, TILES: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_M weight rows, row tile `tile` of an expert's, times BLOCK_N token rows over all of K, in fp32."""
    BLOCK: tl.constexpr = BLOCK_M * (GROUP // 2 + 4)  # bytes of one group of a tile: words, then scales
    before = (expert * TILES).to(tl.int64) * (K // GROUP)  # blocks of other experts
    first = tile // READ * READ
    stride = tl.minimum(TILES - first, READ)
    block = first * (K // GROUP) + tile - first
    COLS: tl.constexpr = GROUP // 4
    PIECES: tl.constexpr = COLS // 8
    offs_m = tl.arange(0, BLOCK_M)
    offs_c = tl.arange(0, COLS)
    flip = offs_m * PIECES // 8 % PIECES
    column = ((offs_c // 8)[None, :] ^ flip[:, None]) * 8 + (offs_c % 8)[None, :]
    # The compiler does not see through the exclusive or that 8 words stay together.
    column = tl.max_contiguous(tl.multiple_of(column, [1, 8]), [1, 8])
    word_ptrs = words_ptr + before * (BLOCK // 2) + offs_m[:, None] * COLS + column
    scale_ptrs = scales_ptr + before * (BLOCK // 4) + BLOCK_M * GROUP // 8 + offs_m
    x_ptrs = x_rows[None, :] + tl.arange(0, GROUP)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in tl.range(0, K // GROUP, num_stages=STAGES):
        a0, a1, a2, a3 = _unpack(tl.load(word_ptrs + (block + group * stride) * (BLOCK // 2)))
        # Joining the quarters along K only renames registers: no data moves.
        weights = tl.join(tl.join(a0, a2), tl.join(a1, a3)).permute(0, 2, 3, 1).reshape(BLOCK_M, GROUP)
        scales = tl.load(scale_ptrs + (block + group * stride) * (BLOCK // 4))
        x_sums = tl.load(sum_rows + group, mask=valid, other=0.0)
        x = tl.load(x_ptrs + group * GROUP, mask=valid[None, :], other=0.0)
        acc = _add_group(acc, weights, x, x_sums, scales)
    return acc


@triton.jit
def _gate_up_tile(
    x_ptr, x_sums_ptr, words_ptr, scales_ptr, row_of_ptr, out_ptr, out_sums_ptr, expert, pid_m, start, end,
    H: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = 2 * INNER // BLOCK_M
    HALF: tl.constexpr = BLOCK_M // 2
    slots = start + tl.arange(0, BLOCK_N)
    valid = slots < end
    rows = tl.load(row_of_ptr + slots, mask=valid, other=0)
    acc = _accumulate(
        x_ptr + rows.to(tl.int64) * H, valid, x_sums_ptr + rows * (H // GROUP), words_ptr, scales_ptr, expert, pid_m,
        TILES, H, GROUP, BLOCK_M, BLOCK_N, STAGES,
    )  # fmt: skip
    gate, up = tl.split(acc.reshape(BLOCK_M // 16, 2, 8, BLOCK_N).permute(0, 2, 3, 1).reshape(HALF, BLOCK_N, 2))
    # gelu_tanh(g) = g * sigmoid(2 * sqrt(2/pi) * (g + 0.044715 g^3)), which does not overflow for large g.
    inner = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    y = rounded(gate / (1.0 + tl.exp(-inner)) * up, tl.bfloat16)
    tl.store(out_sums_ptr + slots * TILES + pid_m, tl.sum(y, 0), mask=valid)
    offs = pid_m * HALF + tl.arange(0, HALF)
    tl.store(out_ptr + slots.to(tl.int64)[None, :] * INNER + offs[:, None], y, mask=valid[None, :])


@triton.jit
def _gate_up_kernel(
    x_ptr, x_sums_ptr, words_ptr, scales_ptr, row_of_ptr, tile_expert_ptr, tile_start_ptr, offsets_ptr, out_ptr,
    out_sums_ptr, H: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = 2 * INNER // BLOCK_M
    pid = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + pid // TILES)
    if expert < 0:
        return
    start = tl.load(tile_start_ptr + pid // TILES)
    end = tl.load(offsets_ptr + expert + 1)
    # A tile at most half full runs half as wide: most experts have about half of BLOCK_N rows.
    if end - start <= BLOCK_N // 2:
        _gate_up_tile(
            x_ptr, x_sums_ptr, words_ptr, scales_ptr, row_of_ptr, out_ptr, out_sums_ptr, expert, pid % TILES, start,
            end, H, INNER, GROUP, BLOCK_M, BLOCK_N // 2, STAGES,
        )  # fmt: skip
    else:
        _gate_up_tile(
            x_ptr, x_sums_ptr, words_ptr, scales_ptr, row_of_ptr, out_ptr, out_sums_ptr, expert, pid % TILES, start,
            end, H, INNER, GROUP, BLOCK_M, BLOCK_N, STAGES,
        )  # fmt: skip


@triton.jit
def _down_tile(
    x_ptr, x_sums_ptr, words_ptr, scales_ptr, out_ptr, expert, pid_m, start, end,
    H: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    slots = start + tl.arange(0, BLOCK_N)
    valid = slots < end
    TILES: tl.constexpr = H // BLOCK_M
    acc = _accumulate(
        x_ptr + slots.to(tl.int64) * INNER, valid, x_sums_ptr + slots * (INNER // GROUP), words_ptr, scales_ptr, expert,
        pid_m, TILES, INNER, GROUP, BLOCK_M, BLOCK_N, STAGES,
    )  # fmt: skip
    offs = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(out_ptr + slots.to(tl.int64)[None, :] * H + offs[:, None], rounded(acc, tl.bfloat16), mask=valid[None, :])


@triton.jit
def _down_kernel(
    x_ptr, x_sums_ptr, words_ptr, scales_ptr, tile_expert_ptr, tile_start_ptr, offsets_ptr, out_ptr,
    H: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = H // BLOCK_M
    pid = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + pid // TILES)
    if expert < 0:
        return
    start = tl.load(tile_start_ptr + pid // TILES)
    end = tl.load(offsets_ptr + expert + 1)
    if end - start <= BLOCK_N // 2:
        _down_tile(
            x_ptr, x_sums_ptr, words_ptr, scales_ptr, out_ptr, expert, pid % TILES, start,
            end, H, INNER, GROUP, BLOCK_M, BLOCK_N // 2, STAGES,
        )  # fmt: skip
    else:
        _down_tile(
            x_ptr, x_sums_ptr, words_ptr, scales_ptr, out_ptr, expert, pid % TILES, start,
            end, H, INNER, GROUP, BLOCK_M, BLOCK_N, STAGES,
        )  # fmt: skip


@dataclass(frozen=True)
class ExpertSettings(LaunchSettings):
    """Stages and warps of both Triton products. 4 warps: with more, a warp has half the work between two waits."""

    gate_up_stages: int = 4
    gate_up_warps: int = 4
    down_stages: int = 4
    down_warps: int = 4

    def shared(self) -> int:
        def stage(group: int) -> int:  # 128 weight rows of 4 bits with their scales, token rows of 16 with their sums
            return 128 * (group // 2 + 4) + TILE_ROWS * (2 * group + 4)

        return max(self.gate_up_stages * stage(128), self.down_stages * stage(64))


EXPERTS = ExpertSettings()


class ExpertBuffers:
    """What the Triton products write for S = rows * top_k slots, in tiles of `tile_rows`."""

    tile_rows = TILE_ROWS

    def __init__(self, slots: int, hidden: int, width: int, spec: QuantSpec, device: torch.device):
        self.settings: ExpertSettings | None = None  # those of the GPU in use
        self.inner = torch.empty(slots, width, dtype=torch.bfloat16, device=device)
        self.inner_sums = torch.empty(slots, width // spec.group_down, dtype=torch.float32, device=device)
        self.out = torch.empty(slots, hidden, dtype=torch.bfloat16, device=device)


Buffers = ExpertBuffers | HopperBuffers


def expert_buffers(
    rows: int, top_k: int, num_experts: int, hidden: int, width: int, spec: QuantSpec, device: torch.device,
    products: HopperProducts | None,
) -> Buffers:  # fmt: skip
    """Buffers for `rows` rows and packed experts of `width`, of the kernels that `expert_products` chose."""
    if products is not None:
        return HopperBuffers(products, rows, top_k, num_experts, device)
    return ExpertBuffers(rows * top_k, hidden, width, spec, device)


@lru_cache
def expert_products(hidden: int, width: int, spec: QuantSpec, device: torch.device) -> HopperProducts | None:
    """The Hopper products, once they gave what the reference gives for a layer of two experts; None: Triton's do it."""
    products = hopper_products(hidden, width, spec, device)
    if products is None:
        return None
    # Rows for either kind of tile. A right result is off by 3e-3: its input, middle and output are BF16.
    right = all(_error(products, spec, rows, device) < 1e-2 for rows in (40, 160))
    return products if right else None


def _error(products: HopperProducts, spec: QuantSpec, rows: int, device: torch.device) -> float:
    """How far the products are from the reference, relative to it, for random experts and rows."""
    experts, hidden, width = 2, products.hidden, products.width
    generator = torch.Generator(device).manual_seed(0)

    def half(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=generator, device=device) + 0.5).half()

    def matrix(out: int, k: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        words = torch.randint(256, (experts, out, k // 2), generator=generator, device=device, dtype=torch.uint8)
        return words, half(experts, out, k // group) * (0.2 * k**-0.5), half(experts, out, k // group) * 7.5

    packed = PackedExperts(*matrix(2 * width, hidden, spec.group_gate_up), *matrix(hidden, width, spec.group_down))
    x = torch.randn(rows, hidden, generator=generator, device=device).bfloat16()
    index = torch.randint(experts, (rows, 1), generator=generator, device=device)
    out, slots = slot_outputs(x, x, repack_width(packed, width, spec), width, index.int(), products)
    expected = run_experts(x.float(), packed, torch.ones(rows, 1, device=device), index)
    return float((out[slots.slot_of.long()] - expected).norm() / expected.norm())


def prepare_rows(x: torch.Tensor, buffers: Buffers | None) -> None:
    """The part of `expert_rows` that needs no routing: it may run beside the router. x BF16 [T, H]."""
    if isinstance(buffers, HopperBuffers):
        buffers.split_rows(x)


def expert_rows(
    x: torch.Tensor, x_sums: torch.Tensor, experts: DenseExperts | RepackedExperts, slots: Slots,
    buffers: Buffers | None,
) -> torch.Tensor:  # fmt: skip
    """Every slot's expert output before the routing weights, BF16 [S, H]; of packed experts in `buffers.out`.

    x BF16 [T, H], after `prepare_rows`; x_sums fp32 [T, H/G1] its sums over each group (packed experts only); slots for
    tiles of `buffers.tile_rows`, or of any for experts in BF16.
    """
    if isinstance(experts, DenseExperts):
        return _dense_rows(x, experts, slots)
    assert buffers is not None, "packed experts write into buffers"
    if isinstance(buffers, HopperBuffers):
        buffers.multiply(experts, slots)
    else:
        _packed_rows(x, x_sums, experts, slots, buffers)
    return buffers.out


def _packed_rows(
    x: torch.Tensor, x_sums: torch.Tensor, experts: RepackedExperts, slots: Slots, buffers: ExpertBuffers
) -> None:
    hidden, width, spec = x.shape[1], buffers.inner.shape[1], experts.spec
    tiles, (up, down) = slots.tile_expert.shape[0], product_tiles(hidden, spec)

    def launch(s: ExpertSettings) -> None:
        _gate_up_kernel[(tiles * (2 * width // up.rows),)](
            x, x_sums, experts.gate_up.view(torch.int16), experts.gate_up.view(torch.int32), slots.row_of,
            slots.tile_expert, slots.tile_start, slots.offsets, buffers.inner, buffers.inner_sums,
            H=hidden, INNER=width, GROUP=spec.group_gate_up,
            BLOCK_M=up.rows, BLOCK_N=TILE_ROWS, STAGES=s.gate_up_stages, num_warps=s.gate_up_warps,
        )  # fmt: skip
        _down_kernel[(tiles * (hidden // down.rows),)](
            buffers.inner, buffers.inner_sums, experts.down.view(torch.int16), experts.down.view(torch.int32),
            slots.tile_expert, slots.tile_start, slots.offsets, buffers.out,
            H=hidden, INNER=width, GROUP=spec.group_down,
            BLOCK_M=down.rows, BLOCK_N=TILE_ROWS, STAGES=s.down_stages, num_warps=s.down_warps,
        )  # fmt: skip

    run("experts.w4.triton", buffers.settings, EXPERTS, launch)


def _dense_rows(x: torch.Tensor, experts: DenseExperts, slots: Slots) -> torch.Tensor:
    """BF16 experts through torch's grouped product."""
    gate_up = _grouped(x[slots.row_of.long()], experts.gate_up, slots.offsets)
    gate, up = gate_up.chunk(2, dim=-1)
    return _grouped(gated(gate, up), experts.down, slots.offsets)


def _grouped(x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x [S, K] sorted by expert times weights [E, N, K] of each row's expert -> [S, N]."""
    if x.is_cuda:
        return torch._grouped_mm(x, weights.transpose(1, 2), offs=offsets[1:])
    ends = offsets.tolist()
    parts = [F.linear(x[a:b], w) for a, b, w in zip(ends, ends[1:], weights, strict=False)]
    return torch.cat(parts)


def _run_repacked(
    x: torch.Tensor, experts: RepackedExperts, weights: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """`run_experts` through the kernels, for passes that are not fused."""
    tiles = x.shape[1] // product_tiles(x.shape[1], experts.spec)[1].rows
    width = experts.down.shape[1] // tiles * experts.spec.group_down
    products = expert_products(x.shape[1], width, experts.spec, x.device)
    sums = x.float().unflatten(1, (-1, experts.spec.group_gate_up)).sum(dim=-1)
    out, slots = slot_outputs(x, sums, experts, width, index.int(), products)
    chosen = out[slots.slot_of.long()].view(*index.shape, -1)
    return (chosen * weights[..., None]).sum(dim=1).to(x.dtype)


def slot_outputs(
    x: torch.Tensor, x_sums: torch.Tensor, experts: RepackedExperts, width: int, index: torch.Tensor,
    products: HopperProducts | None,
) -> tuple[torch.Tensor, Slots]:  # fmt: skip
    """`expert_rows` in buffers of its own, and its slots, for expert ids int32 [T, k] of packed experts of `width`."""
    (rows, top_k), num_experts = index.shape, experts.gate_up.shape[0]
    buffers = expert_buffers(rows, top_k, num_experts, x.shape[1], width, experts.spec, x.device, products)
    slots = empty_slots(rows, top_k, num_experts, buffers.tile_rows, x.device)
    counts = counts_scratch(rows, top_k, num_experts, x.device)
    assign_slots(index, num_experts, buffers.tile_rows, **vars(slots), counts=counts)
    prepare_rows(x, buffers)
    return expert_rows(x, x_sums, experts, slots, buffers), slots
