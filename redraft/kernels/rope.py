"""Rotary position embedding, plain and proportional (a leading share of the pairs rotates, the rest stays still).

Pair (x[i], x[i + D/2]) turns by position * theta^(-2i/D); with partial_rotary_factor f only i < f*D/2 turn.
`qkv_norm_rope` does all that lies between the QKV product and attention: norms, rope, and K and V into the arena.
"""

import torch

from redraft.config import LayerConfig
from redraft.kernels.launch import after_previous, early_launch, rounded, tl, triton
from redraft.kernels.norms import rms_norm
from redraft.kernels.tables import BlockSettings, run


def inverse_frequencies(layer: LayerConfig) -> torch.Tensor:
    """fp32 [head_dim / 2], zeros where the pair does not turn."""
    rotated = int(layer.partial_rotary_factor * layer.head_dim // 2)
    exponent = torch.arange(0, 2 * rotated, 2, dtype=torch.int64).float() / layer.head_dim
    still = torch.zeros(layer.head_dim // 2 - rotated)
    return torch.cat((1.0 / (layer.rope_theta**exponent), still))


Table = tuple[torch.Tensor, torch.Tensor]  # cos and sin


def rope_table(inv_freq: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> Table:
    """cos and sin [N, head_dim] in `dtype` for integer positions [N]; angles are computed in fp32."""
    freqs = positions[:, None].float() * inv_freq
    angles = torch.cat((freqs, freqs), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, table: Table) -> torch.Tensor:
    """Turn x [B, N, heads, D] by a table of N positions."""
    cos, sin = (t[None, :, None, :] for t in table)
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def qkv_norm_rope_reference(
    qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, inv_freq: torch.Tensor, length: torch.Tensor,
    slots: torch.Tensor, eps: float, *, heads: int, kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """What `qkv_norm_rope` writes by lane: q [W, heads, N, D], and k and v [W, kv_heads, N, D]."""
    lanes, dim = slots.shape[0], 2 * inv_freq.shape[0]
    rows = qkv.view(lanes, -1, qkv.shape[-1] // dim, dim)
    q, k = rows[:, :, :heads], rows[:, :, heads : heads + kv_heads]
    v = rows[:, :, heads + kv_heads :] if rows.shape[2] > heads + kv_heads else k
    positions = length[slots][:, None] + torch.arange(rows.shape[1], device=qkv.device)

    def turned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(x, weight, eps)
        tables = (rope_table(inv_freq, p, qkv.dtype) for p in positions)
        return torch.cat([rotate(normed[b : b + 1], table) for b, table in enumerate(tables)]).transpose(1, 2)

    return turned(q, q_weight), turned(k, k_weight), rms_norm(v, None, eps).transpose(1, 2)


@triton.jit
def _inverse_rms(low, high, eps, D: tl.constexpr):
    return tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / D + eps)[:, None]


@triton.jit
def _load_halves(ptr, mask, HALF: tl.constexpr):
    low = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _store_turned(ptr, mask, low, high, inverse, weight_ptr, cols, cos, sin, dtype: tl.constexpr, HALF: tl.constexpr):
    """Norm, then turn, rounding after every operation as the reference does."""
    keep = cols < HALF
    low = rounded(low * inverse * tl.load(weight_ptr + cols, mask=keep, other=0.0).to(tl.float32)[None, :], dtype)
    high = rounded(
        high * inverse * tl.load(weight_ptr + HALF + cols, mask=keep, other=0.0).to(tl.float32)[None, :], dtype
    )
    tl.store(ptr, rounded(rounded(low * cos, dtype) - rounded(high * sin, dtype), dtype), mask=mask)
    tl.store(ptr + HALF, rounded(rounded(high * cos, dtype) + rounded(low * sin, dtype), dtype), mask=mask)


@triton.jit
def _qkv_norm_rope_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, inv_freq_ptr, length_ptr, slots_ptr, q_ptr, keys_ptr, values_ptr,
    stride_qkv, stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, N, rows_cap, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HAS_V: tl.constexpr, Q_PROGRAMS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    row, part = tl.program_id(0), tl.program_id(1)
    lane = (row // N).to(tl.int64)
    slot = tl.load(slots_ptr + lane).to(tl.int64)
    i = row % N
    HALF: tl.constexpr = D // 2
    dtype = q_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK_HALF)
    keep = cols < HALF
    position = (tl.load(length_ptr + slot) + i).to(tl.float32)
    angle = position * tl.load(inv_freq_ptr + cols, mask=keep, other=0.0)
    cos, sin = rounded(tl.cos(angle), dtype)[None, :], rounded(tl.sin(angle), dtype)[None, :]
    source = qkv_ptr + row.to(tl.int64) * stride_qkv
    if part < Q_PROGRAMS:
        heads = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        mask = (heads < HEADS)[:, None] & keep[None, :]
        low, high = _load_halves(source + heads[:, None] * D + cols[None, :], mask, HALF)
        target = q_ptr + lane * stride_qb + heads[:, None] * stride_qh + i * stride_qn + cols[None, :]
        inverse = _inverse_rms(low, high, eps, D)
        _store_turned(target, mask, low, high, inverse, q_weight_ptr, cols, cos, sin, dtype, HALF)
    else:
        heads = (part - Q_PROGRAMS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        mask = (heads < KV_HEADS)[:, None] & keep[None, :]
        own = source + (HEADS + heads[:, None]) * D + cols[None, :]
        arena = slot * stride_kb + heads[:, None].to(tl.int64) * stride_kh + (rows_cap + i) * D + cols[None, :]
        low, high = _load_halves(own, mask, HALF)
        inverse = _inverse_rms(low, high, eps, D)
        _store_turned(keys_ptr + arena, mask, low, high, inverse, k_weight_ptr, cols, cos, sin, dtype, HALF)
        if HAS_V:
            low, high = _load_halves(own + KV_HEADS * D, mask, HALF)
            inverse = _inverse_rms(low, high, eps, D)
        tl.store(values_ptr + arena, rounded(low * inverse, dtype), mask=mask)
        tl.store(values_ptr + arena + HALF, rounded(high * inverse, dtype), mask=mask)


# Elements of q (or of k): one row of a sliding layer makes 3 programs, enough of them for 132 SMs at 256 rows while the
# sines are computed once for 8 heads (4 warps, 16 elements a thread).
ROPE = BlockSettings(2048)


def qkv_norm_rope(
    qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, inv_freq: torch.Tensor, length: torch.Tensor,
    slots: torch.Tensor, eps: float, *, q_out: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows_cap: int,
    settings: BlockSettings | None = None,
) -> None:  # fmt: skip
    """Norm every head of q, k and v, turn q and k to positions length + i, write q out and K and V to the arena.

    Lane b is slot slots[b], int32 [W]. qkv [W * N, (heads + 2 kv_heads) * D] with contiguous rows, or, on full layers,
    without the last part: then V is the raw k, normed. q_weight, k_weight [D]; V's norm has no weight. inv_freq fp32
    [D / 2], length int32 [S]. q_out [W, heads, N, D] with contiguous rows; keys, values [S, kv_heads, rows_cap + at
    least N, D] alike, contiguous from rows inwards; row i of a lane goes to row rows_cap + i of its slot. Angles are
    fp32, as the reference's: the accurate sine, which also reduces 262,144.
    """
    lanes, heads, count, dim = q_out.shape
    kv_heads = keys.shape[1]
    assert keys.stride() == values.stride() and keys.stride()[2:] == (dim, 1), "arena rows must be contiguous"
    assert qkv.stride(1) == 1 and q_out.stride(3) == 1, "rows of qkv and q_out must be contiguous"
    has_v = qkv.shape[1] == (heads + 2 * kv_heads) * dim

    def launch(s: BlockSettings) -> None:
        block_heads = min(max(1, s.block_elements // dim), triton.next_power_of_2(heads))
        q_programs = triton.cdiv(heads, block_heads)
        _qkv_norm_rope_kernel[(lanes * count, q_programs + triton.cdiv(kv_heads, block_heads))](
            qkv, q_weight, k_weight, inv_freq, length, slots, q_out, keys, values,
            qkv.stride(0), *q_out.stride()[:3], *keys.stride()[:2], count, rows_cap, eps,
            HEADS=heads, KV_HEADS=kv_heads, D=dim, HAS_V=has_v, Q_PROGRAMS=q_programs, BLOCK_HEADS=block_heads,
            BLOCK_HALF=triton.next_power_of_2(dim // 2), num_warps=s.num_warps, **early_launch(),
        )  # fmt: skip

    run("rope.sliding" if has_v else "rope.full", settings, ROPE, launch)
