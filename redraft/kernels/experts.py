"""Routed experts: y[t] = sum over slots k of w[t, k] * down_e(gelu(gate_e(x[t])) * up_e(x[t])), e = experts[t, k].

The sum runs over a token's slots in their routed order, never in order of arrival, so it is the same from run to run.

`run_experts` is the specification: plain torch, packed experts dequantised one at a time, so that the BF16 experts of a
layer never exist together. On a GPU, packed experts are first put into the layout of the kernels (`repack`), and two
grouped matrix products run per layer:

* Rows that visit the same expert stand next to each other ("slots", `kernels/slots.py`) and are cut into tiles.
* Weights are the left operand of the tensor cores. One 16-bit word holds four nibbles of one weight row; masking a
  nibble into the low mantissa bits of the BF16 number 128 gives 128 + q exactly, without an integer conversion.
  Pieces of 16 bytes change places within 128 bytes, so that 8 rows read together come from different memory banks.
* Scale and zero act on the accumulator, once per group: acc += s * dot(128 + q, x) - s * (128 + z) * sum(x).
* Gate and up rows alternate in blocks of 8, so both halves of a pair sit in one thread: the activation moves no data.
  A gate/up tile covers one group of the down projection and writes the sums that its zero points need.

On Hopper the same two products run in CUDA C++ (`experts_hopper.py`), on the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from redraft.config import ModelConfig, QuantSpec
from redraft.kernels.experts_hopper import HopperBuffers, hopper_products
from redraft.kernels.launch import INTERPRET, dot, rounded, tl, triton
from redraft.kernels.mlp import gated
from redraft.kernels.slots import Slots, assign_slots, counts_scratch, empty_slots
from redraft.quant.packing import dequantize, pack_nibbles, unpack_nibbles
from redraft.weights import DenseExperts, PackedExperts, RepackedExperts

Experts = DenseExperts | PackedExperts | RepackedExperts


def run_experts(x: torch.Tensor, experts: Experts, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x [T, H], routing weights fp32 [T, k], expert ids int64 [T, k] -> [T, H] in x's dtype."""
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
            slots[rows] = _expert(x[rows // top_k], experts, expert)
            start += count
    weighted = slots * weights.flatten()[:, None]
    return weighted.view(tokens, top_k, -1).sum(dim=1).to(x.dtype)


def _num_experts(experts: DenseExperts | PackedExperts) -> int:
    return experts.down.shape[0] if isinstance(experts, DenseExperts) else experts.dn_q.shape[0]


def _expert(x: torch.Tensor, experts: DenseExperts | PackedExperts, e: int) -> torch.Tensor:
    if isinstance(experts, DenseExperts):
        gate_up, down = experts.gate_up[e], experts.down[e]
    else:
        gate_up = dequantize(experts.gu_q[e], experts.gu_s[e], experts.gu_z[e], x.dtype)
        down = dequantize(experts.dn_q[e], experts.dn_s[e], experts.dn_z[e], x.dtype)
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(gated(gate, up), down)


@dataclass(frozen=True)
class GemmTile:
    """Settings of one grouped product: weight rows a program, k a step (a group), stages, warps."""

    rows: int
    k_block: int
    stages: int
    warps: int


READ_TILES = 3  # row tiles that the Hopper products read together
TILE_ROWS = 32  # token rows a tile; with more, two accumulators of 128 x rows run out of registers (docs/log.md)
# Measured on an H200 (docs/log.md): 4 warps, since more halve the work a warp has between two waits.
GATE_UP_TILE = GemmTile(rows=128, k_block=128, stages=4, warps=4)
DOWN_TILE = GemmTile(rows=128, k_block=64, stages=4, warps=4)


def gemm_tiles(config: ModelConfig, spec: QuantSpec) -> tuple[GemmTile, GemmTile] | None:
    """Settings for the gate/up and down products of these shapes, or None where the kernels do not cover them."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    rows = 2 * spec.group_down  # a gate/up tile is one group of down
    gate_up = replace(GATE_UP_TILE, rows=rows, k_block=spec.group_gate_up)
    down = replace(DOWN_TILE, rows=min(128, hidden), k_block=spec.group_down)
    powers = all(n & (n - 1) == 0 for n in (spec.group_gate_up, spec.group_down, down.rows))
    fits = 2 * inner % rows == 0 and hidden % down.rows == 0
    large = spec.group_down >= 32 and spec.group_gate_up >= 32
    return (gate_up, down) if powers and fits and large else None


def repack(packed: PackedExperts, config: ModelConfig, spec: QuantSpec) -> RepackedExperts:
    """Packed experts in the layout of the kernels, with as many bytes. The shapes must be covered by `gemm_tiles`."""
    tiles = gemm_tiles(config, spec)
    assert tiles is not None, "gemm_tiles covers these shapes"
    gate_up, down = tiles
    order = _gate_up_order(config.moe_intermediate_size, packed.gu_q.device)
    return RepackedExperts(
        gate_up_words=_words(packed.gu_q[:, order], gate_up),
        gate_up_scales=_scales(packed.gu_s[:, order], packed.gu_z[:, order], gate_up),
        down_words=_words(packed.dn_q, down),
        down_scales=_scales(packed.dn_s, packed.dn_z, down),
        spec=spec,
    )


def _gate_up_order(inner: int, device: torch.device) -> torch.Tensor:
    """Row order of gate_up that puts 8 gate rows and their 8 up rows next to each other."""
    block = torch.arange(inner, device=device).view(-1, 1, 8)
    return torch.cat((block, block + inner), dim=1).flatten()


def unpack_layer(repacked: RepackedExperts, config: ModelConfig) -> PackedExperts:
    """The inverse of `repack`, bit for bit."""
    back = _gate_up_order(config.moe_intermediate_size, repacked.gate_up_words.device).argsort()
    gu_s, gu_z = _unpack_scales(repacked.gate_up_scales, 2 * config.moe_intermediate_size)
    dn_s, dn_z = _unpack_scales(repacked.down_scales, config.hidden_size)
    return PackedExperts(
        gu_q=_unpack_words(repacked.gate_up_words, 2 * config.moe_intermediate_size)[:, back],
        gu_s=gu_s[:, back],
        gu_z=gu_z[:, back],
        dn_q=_unpack_words(repacked.down_words, config.hidden_size),
        dn_s=dn_s,
        dn_z=dn_z,
    )


def _unpack_words(words: torch.Tensor, rows: int) -> torch.Tensor:
    ordered = _swizzled(_in_order(words, rows))
    quarters = torch.stack([(ordered >> (4 * j) & 15).to(torch.uint8) for j in range(4)], dim=-2)
    return pack_nibbles(quarters.transpose(2, 3).flatten(3).flatten(1, 2))


def _unpack_scales(both: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point, fp16 [E, R, G]."""
    ordered = _in_order(both, rows).transpose(2, 3).flatten(1, 2).contiguous()
    halves = ordered.unsqueeze(-1).view(torch.float16)
    return halves[..., 0].contiguous(), halves[..., 1].contiguous()


def _in_order(blocks: torch.Tensor, rows: int) -> torch.Tensor:
    """The inverse of `_reordered` for `rows` weight rows: [E, blocks, tile rows, ...] -> [E, tiles, groups, ...]."""
    tiles = rows // blocks.shape[2]
    order = _block_order(tiles, blocks.shape[1] // tiles).to(blocks.device)
    return blocks[:, order]


def _words(packed: torch.Tensor, tile: GemmTile) -> torch.Tensor:
    """uint8 [E, R, K/2] -> int16 [E, R/rows * K/k_block, rows, k_block/4], blocks in the order of `_block_order`.

    Nibble j of word c in a block is k = j * k_block/4 + c: the same nibble of all words is a contiguous quarter.
    """
    quarters = unpack_nibbles(packed).unflatten(-1, (-1, 4, tile.k_block // 4)).unflatten(1, (-1, tile.rows))
    words = torch.zeros_like(quarters[..., 0, :], dtype=torch.int32)
    for j in range(4):
        words |= quarters[..., j, :].to(torch.int32) << (4 * j)
    return _reordered(_swizzled(words.to(torch.int16).transpose(2, 3)))


def _swizzled(words: torch.Tensor) -> torch.Tensor:
    """Pieces of 8 words of every row [..., rows, C] in the places the kernels read them from; its own inverse."""
    rows, columns = words.shape[-2:]
    pieces = columns // 8
    flip = torch.arange(rows, device=words.device) * pieces // 8 % pieces
    place = (torch.arange(pieces, device=words.device) ^ flip[:, None])[..., None].expand(rows, pieces, 8)
    blocks = words.unflatten(-1, (pieces, 8))
    return blocks.gather(-2, place.expand(blocks.shape)).flatten(-2).contiguous()


def _scales(scale: torch.Tensor, zero: torch.Tensor, tile: GemmTile) -> torch.Tensor:
    """fp16 [E, R, G] twice -> int32 [E, R/rows * G, rows]: scale in the low half, zero point in the high half."""
    both = torch.stack((scale, zero), dim=-1).unflatten(1, (-1, tile.rows)).transpose(2, 3).contiguous()
    return _reordered(both.view(torch.int32).squeeze(-1))


def _block_order(tiles: int, groups: int) -> torch.Tensor:
    """Where block (tile, group) lies, int64 [tiles, groups]: one group of three row tiles is read in one piece."""
    tile, group = torch.arange(tiles)[:, None], torch.arange(groups)[None, :]
    first = tile // READ_TILES * READ_TILES
    return first * groups + group * (tiles - first).clamp(max=READ_TILES) + tile - first


def _reordered(blocks: torch.Tensor) -> torch.Tensor:
    """[E, tiles, groups, ...] -> [E, tiles * groups, ...] in the order of `_block_order`."""
    place = _block_order(blocks.shape[1], blocks.shape[2]).flatten().argsort().to(blocks.device)
    return blocks.flatten(1, 2)[:, place].contiguous()


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
    x_rows,
    valid,
    sum_rows,
    words_ptr,
    scales_ptr,
    tile,
    TILES: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_M weight rows, row tile `tile` of an expert's, times BLOCK_N token rows over all of K, in fp32."""
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
    word_ptrs = words_ptr + offs_m[:, None] * COLS + column
    x_ptrs = x_rows[None, :] + tl.arange(0, GROUP)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in tl.range(0, K // GROUP, num_stages=STAGES):
        a0, a1, a2, a3 = _unpack(tl.load(word_ptrs + (block + group * stride) * (BLOCK_M * COLS)))
        # Joining the quarters along K only renames registers: no data moves.
        weights = tl.join(tl.join(a0, a2), tl.join(a1, a3)).permute(0, 2, 3, 1).reshape(BLOCK_M, GROUP)
        scales = tl.load(scales_ptr + (block + group * stride) * BLOCK_M + offs_m)
        x_sums = tl.load(sum_rows + group, mask=valid, other=0.0)
        x = tl.load(x_ptrs + group * GROUP, mask=valid[None, :], other=0.0)
        acc = _add_group(acc, weights, x, x_sums, scales)
    return acc


@triton.jit
def _gate_up_tile(
    x_ptr,
    x_sums_ptr,
    words_ptr,
    scales_ptr,
    row_of_ptr,
    out_ptr,
    out_sums_ptr,
    expert,
    pid_m,
    start,
    end,
    H: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    TILES: tl.constexpr = 2 * INNER // BLOCK_M
    HALF: tl.constexpr = BLOCK_M // 2
    slots = start + tl.arange(0, BLOCK_N)
    valid = slots < end
    rows = tl.load(row_of_ptr + slots, mask=valid, other=0)
    first = (expert * TILES).to(tl.int64)
    acc = _accumulate(
        x_ptr + rows.to(tl.int64) * H,
        valid,
        x_sums_ptr + rows * (H // GROUP),
        words_ptr + first * (BLOCK_M * H // 4),
        scales_ptr + first * (BLOCK_M * (H // GROUP)),
        pid_m,
        TILES,
        H,
        GROUP,
        BLOCK_M,
        BLOCK_N,
        STAGES,
    )
    gate, up = tl.split(acc.reshape(BLOCK_M // 16, 2, 8, BLOCK_N).permute(0, 2, 3, 1).reshape(HALF, BLOCK_N, 2))
    # gelu_tanh(g) = g * sigmoid(2 * sqrt(2/pi) * (g + 0.044715 g^3)), which does not overflow for large g.
    inner = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    y = rounded(gate / (1.0 + tl.exp(-inner)) * up, tl.bfloat16)
    tl.store(out_sums_ptr + slots * TILES + pid_m, tl.sum(y, 0), mask=valid)
    offs = pid_m * HALF + tl.arange(0, HALF)
    tl.store(out_ptr + slots.to(tl.int64)[None, :] * INNER + offs[:, None], y, mask=valid[None, :])


@triton.jit
def _gate_up_kernel(
    x_ptr,
    x_sums_ptr,
    words_ptr,
    scales_ptr,
    row_of_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    offsets_ptr,
    out_ptr,
    out_sums_ptr,
    H: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
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
    x_ptr,
    x_sums_ptr,
    words_ptr,
    scales_ptr,
    out_ptr,
    expert,
    pid_m,
    start,
    end,
    H: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    slots = start + tl.arange(0, BLOCK_N)
    valid = slots < end
    TILES: tl.constexpr = H // BLOCK_M
    first = (expert * TILES).to(tl.int64)
    acc = _accumulate(
        x_ptr + slots.to(tl.int64) * INNER,
        valid,
        x_sums_ptr + slots * (INNER // GROUP),
        words_ptr + first * (BLOCK_M * INNER // 4),
        scales_ptr + first * (BLOCK_M * (INNER // GROUP)),
        pid_m,
        TILES,
        INNER,
        GROUP,
        BLOCK_M,
        BLOCK_N,
        STAGES,
    )
    offs = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(out_ptr + slots.to(tl.int64)[None, :] * H + offs[:, None], rounded(acc, tl.bfloat16), mask=valid[None, :])


@triton.jit
def _down_kernel(
    x_ptr,
    x_sums_ptr,
    words_ptr,
    scales_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    offsets_ptr,
    out_ptr,
    H: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
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


class ExpertBuffers:
    """What the Triton products write for S = rows * top_k slots."""

    def __init__(self, slots: int, hidden: int, width: int, spec: QuantSpec, device: torch.device):
        self.inner = torch.empty(slots, width, dtype=torch.bfloat16, device=device)
        self.inner_sums = torch.empty(slots, width // spec.group_down, dtype=torch.float32, device=device)
        self.out = torch.empty(slots, hidden, dtype=torch.bfloat16, device=device)


Buffers = ExpertBuffers | HopperBuffers


def expert_buffers(
    rows: int, top_k: int, hidden: int, width: int, spec: QuantSpec, device: torch.device, *, hopper: bool = True
) -> Buffers:
    """Buffers of the kernels that suit `device`, for packed experts of this width; hopper False: of the Triton ones."""
    products = hopper_products(hidden, width, spec, device) if hopper else None
    if products is not None:
        return HopperBuffers(products, rows, top_k, device)
    return ExpertBuffers(rows * top_k, hidden, width, spec, device)


def prepare_rows(x: torch.Tensor, buffers: Buffers | None) -> None:
    """The part of `expert_rows` that needs no routing: it may run beside the router. x BF16 [T, H]."""
    if isinstance(buffers, HopperBuffers):
        buffers.split_rows(x)


def expert_rows(
    x: torch.Tensor,
    x_sums: torch.Tensor,
    experts: DenseExperts | RepackedExperts,
    slots: Slots,
    buffers: Buffers | None,
) -> torch.Tensor:
    """Every slot's expert output before the routing weights, BF16 [S, H]; of packed experts in `buffers.out`.

    x BF16 [T, H], after `prepare_rows`; x_sums fp32 [T, H/G1] its sums over each group (packed experts only); slots for
    tiles of TILE_ROWS.
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
    x: torch.Tensor,
    x_sums: torch.Tensor,
    experts: RepackedExperts,
    slots: Slots,
    buffers: ExpertBuffers,
) -> None:
    hidden, width = x.shape[1], buffers.inner.shape[1]
    gate_up, down = experts.gate_up_words, experts.down_words
    tiles, rows = slots.tile_expert.shape[0], gate_up.shape[2]
    _gate_up_kernel[(tiles * (2 * width // rows),)](
        x, x_sums, gate_up, experts.gate_up_scales, slots.row_of, slots.tile_expert, slots.tile_start, slots.offsets,
        buffers.inner, buffers.inner_sums, H=hidden, INNER=width, GROUP=experts.spec.group_gate_up,
        BLOCK_M=rows, BLOCK_N=TILE_ROWS, STAGES=GATE_UP_TILE.stages, num_warps=GATE_UP_TILE.warps,
    )  # fmt: skip
    _down_kernel[(tiles * (hidden // down.shape[2]),)](
        buffers.inner, buffers.inner_sums, down, experts.down_scales, slots.tile_expert, slots.tile_start,
        slots.offsets, buffers.out, H=hidden, INNER=width, GROUP=experts.spec.group_down,
        BLOCK_M=down.shape[2], BLOCK_N=TILE_ROWS, STAGES=DOWN_TILE.stages, num_warps=DOWN_TILE.warps,
    )  # fmt: skip


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
    (tokens, top_k), num_experts = index.shape, experts.gate_up_words.shape[0]
    width = experts.down_words[0].numel() * 4 // x.shape[1]
    slots = empty_slots(tokens, top_k, num_experts, TILE_ROWS, x.device)
    counts = counts_scratch(tokens, top_k, num_experts, x.device)
    assign_slots(index.int(), num_experts, TILE_ROWS, **vars(slots), counts=counts)
    buffers = expert_buffers(tokens, top_k, x.shape[1], width, experts.spec, x.device)
    sums = x.float().unflatten(1, (-1, experts.spec.group_gate_up)).sum(dim=-1)
    prepare_rows(x, buffers)
    out = expert_rows(x, sums, experts, slots, buffers)
    chosen = out[slots.slot_of.long()].view(tokens, top_k, -1)
    return (chosen * weights[..., None]).sum(dim=1).to(x.dtype)
