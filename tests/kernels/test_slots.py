"""Slots and tiles against a stable sort: every entry is an integer, so they are equal or wrong."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerance import DEVICE

from redraft.kernels import slots
from redraft.kernels.slots import assign_slots, assign_slots_reference, counts_scratch, empty_slots, max_tiles


def check(experts: torch.Tensor, num_experts: int, tile_rows: int) -> None:
    rows, top_k = experts.shape
    experts = experts.to(DEVICE, torch.int32)
    actual = empty_slots(rows, top_k, num_experts, tile_rows, DEVICE)
    scratch = counts_scratch(rows, top_k, num_experts, DEVICE)
    for tensor in (*vars(actual).values(), *([] if scratch is None else [scratch])):
        tensor.fill_(-99)
    assign_slots(experts, num_experts, tile_rows, **vars(actual), counts=scratch)
    expected = assign_slots_reference(experts, num_experts, tile_rows)
    for name, tensor in vars(actual).items():
        assert torch.equal(tensor, getattr(expected, name)), name


def routing(rows: int, top_k: int, num_experts: int) -> torch.Tensor:
    """Distinct experts in every row."""
    return torch.rand(rows, num_experts).argsort(dim=1)[:, :top_k]


def test_slots_by_hand():
    experts = torch.tensor([[2, 0], [2, 3], [0, 2]], dtype=torch.int32, device=DEVICE)
    out = empty_slots(3, 2, 5, 2, DEVICE)
    assign_slots(experts, 5, 2, **vars(out))
    assert out.slot_of.tolist() == [2, 0, 3, 5, 1, 4]
    assert out.row_of.tolist() == [0, 2, 0, 1, 2, 1]
    assert out.offsets.tolist() == [0, 2, 2, 5, 6, 6]
    assert out.tile_expert.tolist() == [0, 2, 2, 3, -1]
    assert out.tile_start.tolist() == [0, 2, 4, 5, 6]


@pytest.mark.parametrize("tile_rows", [1, 16])
@pytest.mark.parametrize(("rows", "top_k", "num_experts"), [(1, 2, 8), (17, 3, 5), (255, 2, 6)])
def test_one_launch(rows, top_k, num_experts, tile_rows):
    assert counts_scratch(rows, top_k, num_experts, DEVICE) is None
    check(routing(rows, top_k, num_experts), num_experts, tile_rows)


@pytest.mark.parametrize("rows", [65, 128, 257, 600])
def test_several_blocks(rows, monkeypatch):
    """Small blocks, so that few rows need many; past MAX_BLOCKS they grow."""
    monkeypatch.setattr(slots, "MIN_BLOCK", 128)
    monkeypatch.setattr(slots, "MAX_BLOCKS", 6)
    assert counts_scratch(rows, 2, 6, DEVICE) is not None
    check(routing(rows, 2, 6), 6, 16)


@pytest.mark.parametrize("rows", [40, 100])
def test_one_expert_takes_everything(rows, monkeypatch):
    monkeypatch.setattr(slots, "MIN_BLOCK", 128)
    for expert in (0, 3, 4):
        check(torch.full((rows, 2), expert), 5, 16)


@pytest.mark.parametrize("rows", [1, 17, 255, 256, 257, 1024, 4096, 8192, 10_000])
@pytest.mark.parametrize("tile_rows", [16, 32, 128])
@pytest.mark.gpu
def test_real_shapes(rows, tile_rows):
    check(routing(rows, 8, 128), 128, tile_rows)
    skewed = routing(rows, 8, 128)
    skewed[:, 0] = 7  # more rows than any other, and tiles far past one block of the list
    check(skewed, 128, tile_rows)


@given(st.data())
def test_max_tiles_is_enough_and_reached(data):
    rows, top_k = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 8))
    num_experts, tile_rows = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 9))
    bound = max_tiles(rows, top_k, num_experts, tile_rows)

    def tiles(counts: list[int]) -> int:
        return sum(-(-count // tile_rows) for count in counts)

    left, counts = rows * top_k, []
    for _ in range(num_experts - 1):
        counts.append(data.draw(st.integers(0, left)))
        left -= counts[-1]
    assert tiles([*counts, left]) <= bound
    used = min(num_experts, rows * top_k)
    assert tiles([1] * (used - 1) + [rows * top_k - used + 1]) == bound
