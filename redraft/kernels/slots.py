"""Slots: the order in which the routed experts' rows are computed, and the tiles that cover it.

An assignment n = row * k + j sends a row to its j-th expert. Its slot is its rank by (expert, n): one expert's rows are
neighbours, and the order is stable, so the same routing always gives the same slots. Tiles of `tile_rows` slots cover
each expert's share in expert order; an expert without rows has none.

No sort and no atomics. Assignments are cut into at most 32 blocks. One launch counts each block's rows per expert (left
out when there is one block, as for 256 rows of 8 experts); in the next, program (expert, block) finds its first slot
from the counts and numbers its own assignments by a running sum.
"""

from dataclasses import dataclass

import torch

from redraft.kernels.launch import after_previous, early_launch, tl, triton
from redraft.kernels.tables import LaunchSettings, run

MAX_BLOCKS = 32  # counts of all blocks fit one program's registers: 32 x 128 experts
MIN_BLOCK = 2048  # the assignments of one canvas: then a single launch does


@dataclass(frozen=True)
class SlotSettings(LaunchSettings):
    """block_tiles: entries of the tile list at a time; an expert has one or two tiles of a canvas, some 35 of 32
    canvases. With 4 warps a thread has 16 of the assignments of one canvas."""

    block_tiles: int = 64
    num_warps: int = 4


SLOTS = SlotSettings()


@dataclass(frozen=True)
class Slots:
    """Where every assignment of a pass goes. All int32."""

    slot_of: torch.Tensor  # [R * k], the slot of each assignment
    row_of: torch.Tensor  # [R * k], the row that a slot holds
    offsets: torch.Tensor  # [E + 1], each expert's first slot, then the end
    tile_expert: torch.Tensor  # [tiles], -1 after the last
    tile_start: torch.Tensor  # [tiles], first slot; R * k after the last


def max_tiles(rows: int, top_k: int, num_experts: int, tile_rows: int) -> int:
    """The most tiles any routing can need: every expert that can start one does, the rest fill whole tiles."""
    assignments = rows * top_k
    used = min(num_experts, assignments)
    return used + (assignments - used) // tile_rows


def empty_slots(rows: int, top_k: int, num_experts: int, tile_rows: int, device: torch.device) -> Slots:
    """Unfilled tensors for `assign_slots`."""
    tiles = max_tiles(rows, top_k, num_experts, tile_rows)
    sizes = (rows * top_k, rows * top_k, num_experts + 1, tiles, tiles)
    return Slots(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))


def counts_scratch(rows: int, top_k: int, num_experts: int, device: torch.device) -> torch.Tensor | None:
    """The int32 scratch `assign_slots` needs between its two launches, or None when it makes only one."""
    blocks, _ = _blocks(rows * top_k)
    if blocks == 1:
        return None
    return torch.empty(blocks, _expert_block(num_experts), dtype=torch.int32, device=device)


def assign_slots_reference(experts: torch.Tensor, num_experts: int, tile_rows: int) -> Slots:
    """What `assign_slots` writes, by a stable sort."""
    rows, top_k = experts.shape
    slots = empty_slots(rows, top_k, num_experts, tile_rows, experts.device)
    order = experts.flatten().argsort(stable=True)
    slots.slot_of[order] = torch.arange(order.numel(), dtype=torch.int32, device=experts.device)
    slots.row_of.copy_(order // top_k)
    counts = torch.bincount(experts.flatten(), minlength=num_experts)
    slots.offsets[0] = 0
    slots.offsets[1:] = counts.cumsum(0)
    ends = slots.offsets.tolist()
    tiles = [(e, start) for e in range(num_experts) for start in range(ends[e], ends[e + 1], tile_rows)]
    tiles += [(-1, order.numel())] * (slots.tile_expert.shape[0] - len(tiles))
    slots.tile_expert.copy_(torch.tensor([expert for expert, _ in tiles]))
    slots.tile_start.copy_(torch.tensor([start for _, start in tiles]))
    return slots


@triton.jit
def _count_kernel(experts_ptr, counts_ptr, A, BLOCK_A: tl.constexpr, BLOCK_E: tl.constexpr, EARLY: tl.constexpr):
    after_previous(EARLY)
    pid_b = tl.program_id(0)
    n = pid_b * BLOCK_A + tl.arange(0, BLOCK_A)
    ids = tl.load(experts_ptr + n, mask=n < A, other=0)
    counts = tl.histogram(ids, BLOCK_E, mask=n < A)
    tl.store(counts_ptr + pid_b * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@triton.jit
def _tiles(tile_expert_ptr, tile_start_ptr, expert, first, last, start, TILE_ROWS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Entries [first, last) of the tile list: tiles of one expert whose slots begin at `start`."""
    for base in range(first, last, BLOCK_T):
        tile = base + tl.arange(0, BLOCK_T)
        tl.store(tile_expert_ptr + tile, tl.zeros((BLOCK_T,), tl.int32) + expert, mask=tile < last)
        tl.store(tile_start_ptr + tile, start + (tile - first) * TILE_ROWS, mask=tile < last)


@triton.jit
def _assign_kernel(
    experts_ptr, counts_ptr, slot_of_ptr, row_of_ptr, offsets_ptr, tile_expert_ptr, tile_start_ptr, A, TILES,
    E: tl.constexpr, TOP_K: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    expert, pid_b = tl.program_id(0), tl.program_id(1)
    n = pid_b * BLOCK_A + tl.arange(0, BLOCK_A)
    ids = tl.load(experts_ptr + n, mask=n < A, other=E)
    e = tl.arange(0, BLOCK_E)
    if BLOCKS == 1:
        total = tl.histogram(ids, BLOCK_E, mask=n < A)
        earlier = 0
    else:
        b = tl.arange(0, BLOCK_B)[:, None]
        counts = tl.load(counts_ptr + b * BLOCK_E + e[None, :], mask=b < BLOCKS, other=0)
        total = tl.sum(counts, axis=0)
        earlier = tl.sum(tl.sum(tl.where((b < pid_b) & (e[None, :] == expert), counts, 0), axis=1), axis=0)
    start = tl.sum(tl.where(e < expert, total, 0), axis=0)
    mine = ids == expert
    slot = start + earlier + tl.cumsum(mine.to(tl.int32), axis=0) - 1
    tl.store(slot_of_ptr + n, slot, mask=mine)
    tl.store(row_of_ptr + slot, n // TOP_K, mask=mine)
    if pid_b == 0:
        end = start + tl.sum(tl.where(e == expert, total, 0), axis=0)
        tiles = (total + TILE_ROWS - 1) // TILE_ROWS
        first = tl.sum(tl.where(e < expert, tiles, 0), axis=0)
        last = first + (end - start + TILE_ROWS - 1) // TILE_ROWS
        _tiles(tile_expert_ptr, tile_start_ptr, expert, first, last, start, TILE_ROWS, BLOCK_T)
        tl.store(offsets_ptr + expert, start)
        if expert == E - 1:
            tl.store(offsets_ptr + E, end)
            _tiles(tile_expert_ptr, tile_start_ptr, -1, last, TILES, A, 0, BLOCK_T)


def assign_slots(
    experts: torch.Tensor, num_experts: int, tile_rows: int, *, slot_of: torch.Tensor, row_of: torch.Tensor,
    offsets: torch.Tensor, tile_expert: torch.Tensor, tile_start: torch.Tensor, counts: torch.Tensor | None = None,
    settings: SlotSettings | None = None,
) -> None:  # fmt: skip
    """Fill the tensors of `Slots` for experts int32 [R, k], ids in 0..num_experts - 1.

    tile_expert and tile_start hold at least max_tiles(...) entries; counts comes from `counts_scratch`.
    """
    rows, top_k = experts.shape
    (blocks, block), block_e = _blocks(rows * top_k), _expert_block(num_experts)
    assert tile_expert.shape[0] >= max_tiles(rows, top_k, num_experts, tile_rows), "the tile list is too short"
    assert blocks == 1 or counts is not None, "more than one block needs the scratch of counts_scratch"

    def launch(s: SlotSettings) -> None:
        if blocks > 1:
            _count_kernel[(blocks,)](
                experts, counts, rows * top_k, BLOCK_A=block, BLOCK_E=block_e, num_warps=s.num_warps, **early_launch()
            )
        _assign_kernel[(num_experts, blocks)](
            experts, counts, slot_of, row_of, offsets, tile_expert, tile_start, rows * top_k, tile_expert.shape[0],
            E=num_experts, TOP_K=top_k, TILE_ROWS=tile_rows, BLOCKS=blocks, BLOCK_A=block,
            BLOCK_B=triton.next_power_of_2(blocks), BLOCK_E=block_e, BLOCK_T=s.block_tiles, num_warps=s.num_warps,
            **early_launch(),
        )  # fmt: skip

    run("slots", settings, SLOTS, launch)


def _blocks(assignments: int) -> tuple[int, int]:
    """How many blocks, and assignments in each (a power of two)."""
    if assignments <= MIN_BLOCK:
        return 1, max(128, triton.next_power_of_2(assignments))
    block = max(MIN_BLOCK, triton.next_power_of_2(triton.cdiv(assignments, MAX_BLOCKS)))
    return triton.cdiv(assignments, block), block


def _expert_block(num_experts: int) -> int:
    return max(32, triton.next_power_of_2(num_experts))
