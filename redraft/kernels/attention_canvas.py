"""Attention of canvases (every stored and in-flight row visible) over the arena, as two products with P in memory.

Same layout and result as `attention.attend` with causal False, whose docstring describes the arena. One launch makes
P = exp(Q K^T - t) block by block of BLOCK_N keys, t the maximum of a row in that block; a second makes

    out = sum_b e^(t_b - t) P_b V_b / sum_b e^(t_b - t) sum(P_b)        t = max_b t_b

over the blocks b in storage order. Neither keeps a wide accumulator beside a softmax, which is what limits the tiles
of `attend`, and head_dim 512 has its scores computed once. P costs two bytes a score: 10 MiB a lane of 16 heads, 256
rows and 1,280 keys, so that it mostly stays in the L2 cache; many lanes share scratch, a few at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from redraft.kernels.attention import LOG2E
from redraft.kernels.launch import INTERPRET, after_previous, dot, early_launch, rounded, tl, triton
from redraft.kernels.tables import H200, Gpu, LaunchSettings, fitted, run

SCRATCH_BYTES = 128 << 20  # beyond the L2 cache of any GPU; more would only save launches


@dataclass(frozen=True)
class CanvasSettings(LaunchSettings):
    """Launch settings: tiles of block_m rows, P blocks of block_n keys, block_d output columns.

    Scores are summed over block_k columns of Q and K at a time.
    """

    tiles = ("block_m", "block_k", "block_d")

    block_m: int
    block_n: int
    block_k: int
    block_d: int
    weight_stages: int
    value_stages: int
    num_warps: int

    def shared(self) -> int:
        weights = self.weight_stages * self.block_k * (self.block_m + self.block_n)
        return 2 * max(weights, self.value_stages * self.block_n * (self.block_m + self.block_d))


@dataclass(frozen=True)
class CanvasScratch:
    """P [lanes at a time * heads * blocks * N, block_n] and its rows' (maximum * log2(e), sum) fp32 [.., 2]."""

    weights: torch.Tensor
    stats: torch.Tensor
    blocks: int
    lanes: int


def canvas_settings(lanes: int, heads: int, kv_heads: int, rows: int, head_dim: int, gpu: Gpu = H200) -> CanvasSettings:
    """Settings for canvases of `rows` rows.

    Score tiles take 96 KiB, so that two programs share a multiprocessor and one's softmax hides behind the other's
    product. Output tiles are halved where whole ones leave most of the machine idle.
    """
    packed = rows * heads // kv_heads
    block_m, block_d = min(128, triton.next_power_of_2(max(packed, 16))), min(128, head_dim)
    if 4 * lanes * kv_heads * triton.cdiv(packed, block_m) * (head_dim // block_d) < 3 * gpu.sms:
        block_d = min(64, head_dim)
    stages = max(1, min(4, gpu.shared // (2 * 128 * (block_m + block_d))))
    warps = 8 if block_m == 128 else 4
    return fitted(CanvasSettings(block_m, 128, min(64, head_dim), block_d, 3, stages, warps), gpu)


def canvas_scratch(
    lanes: int, heads: int, rows: int, rows_cap: int, settings: CanvasSettings, device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> CanvasScratch:  # fmt: skip
    """Scratch for canvases over at most rows_cap stored rows; dtype is the arena's."""
    blocks = triton.cdiv(rows_cap, settings.block_n) + triton.cdiv(rows, settings.block_n)
    per_lane = heads * rows * blocks
    fit = max(1, SCRATCH_BYTES // (per_lane * settings.block_n * dtype.itemsize))
    at_once = triton.cdiv(lanes, triton.cdiv(lanes, fit))
    weights = torch.empty(at_once * per_lane, settings.block_n, dtype=dtype, device=device)
    return CanvasScratch(weights, torch.empty(at_once * per_lane, 2, device=device), blocks, at_once)


def attend_canvas(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: torch.Tensor, slots: torch.Tensor, rows_cap: int,
    *, out: torch.Tensor, scratch: CanvasScratch, settings: CanvasSettings,
) -> None:  # fmt: skip
    """`attention.attend` with causal False. rows_cap may be smaller than the one that the scratch was made for."""
    (lanes, heads, rows, head_dim), kv_heads, n = q.shape, keys.shape[1], settings.block_n
    group, blocks = heads // kv_heads, triton.cdiv(rows_cap, n) + triton.cdiv(rows, n)

    def launch(s: CanvasSettings) -> None:
        tiles = triton.cdiv(rows * group, s.block_m)
        _weights_kernel[(tiles, pairs, blocks)](
            q[part], keys, length, slots[part], scratch.weights, scratch.stats, *q.stride()[:3],
            keys.shape[2], rows_cap, rows, scratch.blocks,
            KV_HEADS=kv_heads, GROUP=group, D=head_dim, BLOCK_M=s.block_m, BLOCK_N=s.block_n, BLOCK_K=s.block_k,
            num_stages=s.weight_stages, num_warps=s.num_warps, **early_launch(),
        )  # fmt: skip
        _values_kernel[(head_dim // s.block_d, tiles, pairs)](
            values, length, slots[part], scratch.weights, scratch.stats, out[first * rows : part.stop * rows],
            keys.shape[2], rows_cap, rows, scratch.blocks,
            KV_HEADS=kv_heads, GROUP=group, D=head_dim, BLOCK_M=s.block_m, BLOCK_N=s.block_n, BLOCK_D=s.block_d,
            num_stages=s.value_stages, num_warps=s.num_warps, **early_launch(),
        )  # fmt: skip

    for first in range(0, lanes, scratch.lanes):
        part = slice(first, min(first + scratch.lanes, lanes))
        pairs = (part.stop - first) * kv_heads
        run("attention_canvas", settings, None, launch)


@triton.jit
def _block_rows(block, prefix, rows_cap, N, BLOCK_N: tl.constexpr):
    """First arena row of a key block and the end of its region: the prefix's blocks come first, then the pass's own."""
    stored = tl.cdiv(prefix, BLOCK_N)
    is_stored = block < stored
    first = tl.where(is_stored, block * BLOCK_N, rows_cap + (block - stored) * BLOCK_N)
    return first, tl.where(is_stored, prefix, rows_cap + N)


@triton.jit
def _weights_kernel(
    q_ptr, k_ptr, length_ptr, slots_ptr, weights_ptr, stats_ptr,
    stride_qb, stride_qh, stride_qn, arena_rows, rows_cap, N, blocks_cap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    pid_m, pid_h, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane, kv_head = pid_h // KV_HEADS, pid_h % KV_HEADS
    slot = tl.load(slots_ptr + lane)
    prefix = tl.minimum(tl.load(length_ptr + slot), rows_cap)
    if block < tl.cdiv(prefix, BLOCK_N) + tl.cdiv(N, BLOCK_N):
        m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        position, head = m // GROUP, kv_head * GROUP + m % GROUP
        real = position < N
        first, end = _block_rows(block, prefix, rows_cap, N, BLOCK_N)
        n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        inside = n < end - first
        q_row = lane.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + position.to(tl.int64) * stride_qn
        q_at = q_ptr + q_row[:, None] + d[None, :]
        k_at = (
            k_ptr
            + (slot.to(tl.int64) * KV_HEADS + kv_head) * arena_rows * D
            + first * D
            + (n[:, None] * D + d[None, :])
        )
        scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, D, BLOCK_K):
            q = tl.load(q_at + start, mask=real[:, None], other=0.0)
            k = tl.load(k_at + start, mask=inside[:, None], other=0.0)
            scores += dot(q, tl.trans(k))
        scores = tl.where(inside[None, :], scores * LOG2E, float("-inf"))
        top = tl.max(scores, 1)  # finite: a block has at least one key
        p = tl.exp2(scores - top[:, None])
        dtype = weights_ptr.dtype.element_ty
        at = (pid_h.to(tl.int64) * blocks_cap + block) * (N * GROUP) + m
        narrow = (rounded(p, dtype) if INTERPRET else p).to(dtype)
        tl.store(weights_ptr + at[:, None] * BLOCK_N + n[None, :], narrow, mask=real[:, None])
        tl.store(stats_ptr + at * 2, top, mask=real)
        tl.store(stats_ptr + at * 2 + 1, tl.sum(p, 1), mask=real)


@triton.jit
def _values_kernel(
    v_ptr, length_ptr, slots_ptr, weights_ptr, stats_ptr, out_ptr, arena_rows, rows_cap, N, blocks_cap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    pid_d, pid_m, pid_h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane, kv_head = pid_h // KV_HEADS, pid_h % KV_HEADS
    slot = tl.load(slots_ptr + lane)
    prefix = tl.minimum(tl.load(length_ptr + slot), rows_cap)
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    position, head = m // GROUP, kv_head * GROUP + m % GROUP
    real = position < N
    per_block = N * GROUP
    at = pid_h.to(tl.int64) * blocks_cap * per_block + m
    n, column = tl.arange(0, BLOCK_N), pid_d * BLOCK_D + tl.arange(0, BLOCK_D)
    stats_ptr += at * 2
    weights_ptr += at[:, None] * BLOCK_N + n[None, :]
    v_ptr += (slot.to(tl.int64) * KV_HEADS + kv_head) * arena_rows * D + (n[:, None] * D + column[None, :])
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for block in range(tl.cdiv(prefix, BLOCK_N) + tl.cdiv(N, BLOCK_N)):
        first, end = _block_rows(block, prefix, rows_cap, N, BLOCK_N)
        stat = stats_ptr + block * (per_block * 2)
        block_top = tl.load(stat, mask=real, other=0.0)
        block_sum = tl.load(stat + 1, mask=real, other=1.0)
        # 2^31 weights of one head are a million keys.
        p = tl.load(weights_ptr + block * (per_block * BLOCK_N), mask=real[:, None], other=0.0)
        # Rows past the end may hold anything, NaN included: zeros keep 0 * value out of the sum.
        v = tl.load(v_ptr + first * D, mask=(n < end - first)[:, None], other=0.0)
        new_top = tl.maximum(top, block_top)
        rescale, scale = tl.exp2(top - new_top), tl.exp2(block_top - new_top)
        total = total * rescale + block_sum * scale
        acc = acc * rescale[:, None] + dot(p, v) * scale[:, None]
        top = new_top
    out_row = (lane * N + position).to(tl.int64) * (KV_HEADS * GROUP * D) + head * D
    y = rounded(acc / total[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_row[:, None] + column[None, :], y, mask=real[:, None])
