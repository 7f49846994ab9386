"""Commit: a pass's own K/V rows become part of the prefix.

A layer's arena is [S, kv_heads, rows_cap + N_max, D]: rows [0, rows_cap) hold the committed prefix, the rest is where a
pass writes its own rows. Committing `count` rows at `length` copies row rows_cap + j to row (length + j) % rows_cap on
sliding layers, whose prefix is a ring, and to row length + j on full ones, for j < count.
When more rows than the ring holds are committed at once, the earlier ones would be overwritten: they are not copied, so
that every ring row is written once and the result does not depend on the order of writes.
"""

import torch

from redraft.kernels.launch import tl, triton
from redraft.kernels.tables import BlockSettings, run

# Elements of K (and of V), 32 a thread: four 16-byte loads each in flight.
COMMIT = BlockSettings(4096)


def commit_rows_reference(
    keys: torch.Tensor, values: torch.Tensor, length: torch.Tensor, slots: torch.Tensor, count: torch.Tensor,
    rows_cap: int, *, ring: bool,
) -> None:  # fmt: skip
    """What `commit_rows` does, row by row."""
    for slot, rows in zip(slots.tolist(), count.tolist(), strict=True):
        for j in range(rows):
            target = int(length[slot]) + j
            for arena in (keys, values):
                arena[slot, :, target % rows_cap if ring else target] = arena[slot, :, rows_cap + j]


@triton.jit
def _commit_kernel(
    keys_ptr, values_ptr, length_ptr, slots_ptr, count_ptr, stride_kb, stride_kh, KV_HEADS, rows_cap,
    D: tl.constexpr, RING: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pid_n = tl.program_id(0)
    lane, head = tl.program_id(1) // KV_HEADS, (tl.program_id(1) % KV_HEADS).to(tl.int64)
    count = tl.load(count_ptr + lane)
    if pid_n * BLOCK_N >= count:
        return
    j = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.load(slots_ptr + lane).to(tl.int64)
    target = tl.load(length_ptr + slot) + j
    keep = j < count
    if RING:
        target = target % rows_cap
        keep = keep & (j >= count - rows_cap)
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = keep[:, None] & (cols < D)
    base = slot * stride_kb + head * stride_kh
    source = base + (rows_cap + j)[:, None].to(tl.int64) * D + cols
    target = base + target[:, None].to(tl.int64) * D + cols
    tl.store(keys_ptr + target, tl.load(keys_ptr + source, mask=mask, other=0.0), mask=mask)
    tl.store(values_ptr + target, tl.load(values_ptr + source, mask=mask, other=0.0), mask=mask)


def commit_rows(
    keys: torch.Tensor, values: torch.Tensor, length: torch.Tensor, slots: torch.Tensor, count: torch.Tensor,
    rows_cap: int, *, ring: bool, settings: BlockSettings | None = None,
) -> None:  # fmt: skip
    """Copy the first count[b] rows of the own region of slot slots[b] into its prefix, for one layer.

    slots and count int32 [W], distinct slots; a count of 0 leaves one alone. length int32 [S]: rows committed before.
    On a full layer length + count must not exceed rows_cap.
    """
    _, kv_heads, rows, dim = keys.shape
    assert keys.stride() == values.stride() and keys.stride()[2:] == (dim, 1), "arena rows must be contiguous"
    block_d = triton.next_power_of_2(dim)

    def launch(s: BlockSettings) -> None:
        block_n = max(1, s.block_elements // block_d)
        _commit_kernel[(triton.cdiv(rows - rows_cap, block_n), slots.shape[0] * kv_heads)](
            keys, values, length, slots, count, *keys.stride()[:2], kv_heads, rows_cap,
            D=dim, RING=ring, BLOCK_N=block_n, BLOCK_D=block_d, num_warps=s.num_warps,
        )  # fmt: skip

    run("kv_write.sliding" if ring else "kv_write.full", settings, COMMIT, launch)


def advance(length: torch.Tensor, slots: torch.Tensor, count: torch.Tensor) -> None:
    """length[slots] += count, after every layer has committed."""
    length.index_add_(0, slots, count)
