"""Attention of new rows over stored rows plus themselves: softmax(Q K^T) V, scale 1 (q_norm and k_norm set it).

`attention` is the torch reference over explicit keys and a mask. `attend` reads the arena in place: keys and values
hold a prefix region [0, rows_cap), where position p of a slot sits in row p % rows_cap (a ring on sliding layers; full
layers never wrap), and an in-flight region [rows_cap, rows_cap + N) with the pass's own rows. `length` counts a slot's
committed positions; lane b of a pass is slot slots[b]. Key j = 0, 1, ... of a slot is the j-th position it may see,
oldest first:

    prefix = min(length, rows_cap)             row of key j = (length + j - prefix) % rows_cap   for j < prefix
    query i stands at key index prefix + i     row of key j = rows_cap + j - prefix              otherwise

so that "not after the query" is j <= prefix + i and "inside the window" is prefix + i - j < window in both regions.
A softmax sums its keys in any order, so the kernel takes them as stored, in runs of consecutive rows: a canvas the
prefix and its own rows; a causal pass, whose masks need the index of a key, the ring's older and younger part apart.

One program takes one KV head, BLOCK_M rows of (position, query head) pairs packed head-fastest, one share of the keys
and BLOCK_D output columns; it keeps an online softmax in fp32 and rounds the probabilities to the arena's dtype for
the second product. Single rows have their keys split over SPLITS programs, whose outputs a second launch averages in
split order, weighted by their sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from redraft.kernels.launch import INTERPRET, after_previous, dot, early_launch, rounded, tl, triton
from redraft.kernels.tables import H200, Gpu, LaunchSettings, run

LOG2E = tl.constexpr(1.4426950408889634)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Grouped-query attention.

    q [B, heads, N, D], k and v [B, kv_heads, S, D], mask bool [1 or B, 1, N, S] (True = visible) or None for all.
    Returns [B, N, heads * D].
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    return out.transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class AttentionSettings(LaunchSettings):
    """Launch settings: a program makes block_d output columns of block_m rows from one of `splits` key shares."""

    tiles = ("block_m", "block_n")

    block_m: int
    block_n: int
    block_d: int
    num_stages: int
    num_warps: int
    splits: int


def attention_bytes(block_m: int, block_n: int, num_stages: int, head_dim: int, block_d: int) -> int:
    """Shared memory of a program: the Q tile and num_stages K and V tiles."""
    return 2 * (block_m * head_dim + num_stages * block_n * (head_dim + block_d))


# (block_m, block_n), best first: wide tiles keep wgmma fed from shared memory.
_TILES = ((128, 64), (128, 32), (64, 32), (32, 32), (16, 64), (16, 16))
MOST_STAGES = 3


def attention_settings(
    lanes: int, heads: int, kv_heads: int, rows: int, head_dim: int, gpu: Gpu = H200
) -> AttentionSettings:
    """Settings for `rows` new rows a lane, which are summed in the same order whatever the number of lanes.

    block_n and splits set that order. Few lanes fill the machine by smaller tiles: on an H200 one canvas takes 26 us a
    sliding layer in tiles of 64 x 128, as it did in 128 x 256 with its keys in four shares. Only single rows, whose
    tiles are too few, share keys out. The accumulator takes block_m * block_d fp32 registers, 128 a thread at most.
    """
    packed, block_d = rows * heads // kv_heads, min(256, head_dim)
    for block_m, block_n in _TILES:
        fits = attention_bytes(block_m, block_n, 2 if block_m >= 64 else 1, head_dim, block_d) <= gpu.shared
        if fits and block_m < 2 * max(packed, 16):
            break

    def programs(block_m: int, block_d: int) -> int:
        return lanes * kv_heads * triton.cdiv(packed, block_m) * (head_dim // block_d)

    # More than 8 shares cost more to combine than they gain.
    splits = 1 if rows > 1 else max(1, min(8, gpu.sms // (programs(block_m, block_d) // lanes)))
    if block_m == 128:
        for smaller in ((64, block_d), (64, min(128, head_dim))):
            if programs(*smaller) <= gpu.sms:
                block_m, block_d = smaller
    stages = MOST_STAGES
    while stages > 1 and attention_bytes(block_m, block_n, stages, head_dim, block_d) > gpu.shared:
        stages -= 1
    return AttentionSettings(block_m, block_n, block_d, stages, 8 if block_m == 128 else 4, splits)


def attention_scratch(
    lanes: int, heads: int, rows: int, head_dim: int, settings: AttentionSettings, device: torch.device,
    dtype: torch.dtype = torch.float16,
) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """Outputs by share of the keys [splits, W * heads * N, D]; their (maximum, sum) fp32 [splits, W * heads * N, 2].

    fp16 rounds them eight times finer than the BF16 output is, and holds them: they are averages of normed values.
    """
    if settings.splits == 1:
        return None
    count = lanes * heads * rows
    partial = torch.empty(settings.splits, count, head_dim, dtype=dtype, device=device)
    return partial, torch.empty(settings.splits, count, 2, dtype=torch.float32, device=device)


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: torch.Tensor, slots: torch.Tensor, rows_cap: int,
    causal: bool, window: int | None, *, out: torch.Tensor, scratch: tuple[torch.Tensor, torch.Tensor] | None,
    settings: AttentionSettings,
) -> None:  # fmt: skip
    """Attend from q [W, heads, N, D] to the arena rows of keys and values [S, kv_heads, rows_cap + N_max, D].

    slots int32 [W], length int32 [S]; keys and values already hold the pass's own rows in the in-flight region. causal
    False (a canvas): every stored and in-flight row is visible. causal True: rows after the query are not, and with
    `window` neither are those `window` or more before it. out [W * N, heads * D]; scratch from `attention_scratch`. q
    may be a transposed view (its last dimension must be contiguous), the arena must be contiguous.
    """
    lanes, heads, rows, head_dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    partial, stats = scratch if scratch is not None else (out, out)

    def launch(s: AttentionSettings) -> None:
        grid = (triton.cdiv(rows * group, s.block_m), lanes * kv_heads, s.splits * (head_dim // s.block_d))
        _attend_kernel[grid](
            q, keys, values, length, slots, out, partial, stats, *q.stride()[:3], keys.shape[2], rows_cap, rows,
            KV_HEADS=kv_heads, GROUP=group, D=head_dim, CAUSAL=causal, WINDOW=window or 0, SPLITS=s.splits,
            BLOCK_M=s.block_m, BLOCK_N=s.block_n, BLOCK_D=s.block_d, num_warps=s.num_warps, num_stages=s.num_stages,
            **early_launch(),
        )  # fmt: skip

    run("attention", settings, None, launch)
    if settings.splits > 1:
        block = 4  # rows a program: 2 KB or 4 KB of every split, enough loads in flight for 128 threads
        count = lanes * heads * rows
        _combine_kernel[(triton.cdiv(count, block),)](
            partial, stats, out, count, rows,
            KV_HEADS=kv_heads, GROUP=group, D=head_dim, SPLITS=settings.splits, BLOCK_M=block, num_warps=4,
            **early_launch(),
        )  # fmt: skip


@triton.jit
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, length_ptr, slots_ptr, out_ptr, partial_ptr, stats_ptr,
    stride_qb, stride_qh, stride_qn, arena_rows, rows_cap, N,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    pid_m, pid_h = tl.program_id(0), tl.program_id(1)
    pid_s, pid_d = tl.program_id(2) % SPLITS, tl.program_id(2) // SPLITS
    lane, kv_head = pid_h // KV_HEADS, pid_h % KV_HEADS
    slot = tl.load(slots_ptr + lane)
    prefix = tl.minimum(tl.load(length_ptr + slot), rows_cap)
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    position, head = m // GROUP, kv_head * GROUP + m % GROUP
    d = tl.arange(0, D)
    column = pid_d * BLOCK_D + tl.arange(0, BLOCK_D)
    q_row = lane.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + position.to(tl.int64) * stride_qn
    q = tl.load(q_ptr + q_row[:, None] + d[None, :], mask=(position < N)[:, None], other=0.0)
    head_start = (slot.to(tl.int64) * KV_HEADS + kv_head) * arena_rows * D
    k_ptr += head_start
    v_ptr += head_start

    # Blocks of stored rows from the oldest to the prefix's end, those before the oldest (the ring wrapped), own rows.
    # Every tile numbers and shares them out alike, so that the order of a row's sum does not depend on its tile.
    oldest, low, high = 0, 0, N
    if CAUSAL:
        oldest = (tl.load(length_ptr + slot) - prefix) % rows_cap
        high = tl.minimum(N, (pid_m * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
        if WINDOW > 0:
            low = tl.maximum(0, prefix + pid_m * BLOCK_M // GROUP - WINDOW + 1)
    to_young = tl.cdiv(prefix - oldest, BLOCK_N)
    to_own = to_young + tl.cdiv(oldest, BLOCK_N)
    first = tl.where(low < prefix - oldest, low // BLOCK_N, to_young + (low - prefix + oldest) // BLOCK_N)
    first = tl.where(low < prefix, first, to_own + (low - prefix) // BLOCK_N)
    share = tl.cdiv(to_own + tl.cdiv(N, BLOCK_N), SPLITS)
    first, last = tl.maximum(first, pid_s * share), tl.minimum((pid_s + 1) * share, to_own + tl.cdiv(high, BLOCK_N))

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    n = tl.arange(0, BLOCK_N)
    at_k, at_v = n[:, None] * D + d[None, :], n[:, None] * D + column[None, :]
    for block in range(first, last):
        is_old, is_own = block < to_young, block >= to_own
        row = tl.where(is_old, oldest + block * BLOCK_N, (block - to_young) * BLOCK_N)
        row = tl.where(is_own, rows_cap + (block - to_own) * BLOCK_N, row)
        end = tl.where(is_own, rows_cap + N, tl.where(is_old, prefix, oldest))
        inside = n < end - row
        start = row * D  # inside one head, where 2^31 elements are 4 million rows
        # Rows past the end may hold anything, NaN included: zeros keep 0 * value out of the sum.
        k = tl.load(k_ptr + start + at_k, mask=inside[:, None], other=0.0)
        v = tl.load(v_ptr + start + at_v, mask=inside[:, None], other=0.0)
        visible = inside[None, :]
        if CAUSAL:
            ahead = tl.where(is_own, prefix - rows_cap, tl.where(is_old, -oldest, rows_cap - oldest))
            j = row + ahead + n
            visible = visible & (j[None, :] <= prefix + position[:, None])
            if WINDOW > 0:
                visible = visible & (prefix + position[:, None] - j[None, :] < WINDOW)
        scores = tl.where(visible, dot(q, tl.trans(k)), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet keeps -inf; any finite stand-in makes its exponentials 0, not NaN.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top) * LOG2E
        p = tl.exp2(scores * LOG2E - shift[:, None])
        rescale = tl.exp2(top * LOG2E - shift)
        total = total * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        acc += dot((rounded(p, v.dtype) if INTERPRET else p).to(v.dtype), v)
        top = new_top

    inside = position < N
    # A share of the keys in which a row sees nothing has the sum 0; its output counts for nothing, but must be finite.
    y = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLITS == 1:
        out_row = (lane * N + position).to(tl.int64) * (KV_HEADS * GROUP * D) + head * D
        y = rounded(y, out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_row[:, None] + column[None, :], y, mask=inside[:, None])
    else:
        rows = tl.num_programs(1).to(tl.int64) * N * GROUP
        scratch = pid_s * rows + pid_h.to(tl.int64) * N * GROUP + m
        y = y.to(partial_ptr.dtype.element_ty)
        tl.store(partial_ptr + scratch[:, None] * D + column[None, :], y, mask=inside[:, None])
        # Programs of other output columns hold the same sums.
        tl.store(stats_ptr + scratch * 2, top, mask=inside & (pid_d == 0))
        tl.store(stats_ptr + scratch * 2 + 1, total, mask=inside & (pid_d == 0))


@triton.jit
def _combine_kernel(
    partial_ptr, stats_ptr, out_ptr, count, N,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Sum of the splits' partial outputs, each scaled to the common maximum, over the sum of their sums."""
    after_previous(EARLY)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < count
    d = tl.arange(0, D)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for s in tl.static_range(SPLITS):
        top = tl.maximum(top, tl.load(stats_ptr + (s * count + m) * 2, mask=inside, other=0.0))
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for s in tl.static_range(SPLITS):
        stat = stats_ptr + (s * count + m) * 2
        weight = tl.exp2((tl.load(stat, mask=inside, other=0.0) - top) * LOG2E)
        weight *= tl.load(stat + 1, mask=inside, other=1.0)
        total += weight
        part = tl.load(partial_ptr + (s * count + m)[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
        acc += weight[:, None] * part.to(tl.float32)
    # Scratch rows run (lane, KV head, position, head of the group); output rows (lane, position, head).
    per_head = N * GROUP
    lane_head, position, g = m // per_head, m % per_head // GROUP, m % GROUP
    out_row = (lane_head // KV_HEADS * N + position) * (KV_HEADS * GROUP) + lane_head % KV_HEADS * GROUP + g
    y = rounded(acc / total[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_row[:, None] * D + d[None, :], y, mask=inside[:, None])
