"""Committing rows of the arena: copies, so equal or wrong."""

import pytest
import torch
from tolerance import DEVICE, gaussian, in_slots, slot_table

from redraft.kernels.kv_write import advance, commit_rows, commit_rows_reference
from redraft.kernels.tables import BlockSettings

CASES = [
    (True, 9, 8, [0, 4, 7, 30], [8, 0, 5, 1], 8),
    (True, 5, 12, [0, 3, 11], [12, 7, 5], 16),
    (False, 40, 8, [0, 4, 32], [8, 0, 8], 16),
    pytest.param(True, 1023, 1024, [0, 1000, 5000], [1024, 256, 0], 256, marks=pytest.mark.gpu),
    pytest.param(False, 9000, 256, [0, 8191, 8744], [256, 17, 256], 512, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("ring", "rows_cap", "room", "lengths", "counts", "dim"), CASES)
def test_commit_rows(ring, rows_cap, room, lengths, counts, dim):
    arena = [gaussian(len(lengths) + 1, 2, rows_cap + room, dim) for _ in range(2)]
    expected = [tensor.clone() for tensor in arena]
    start, count = (torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in (lengths, counts))
    length, slots = in_slots(start), slot_table(len(lengths))
    commit_rows_reference(*expected, length, slots, count, rows_cap, ring=ring)
    commit_rows(*arena, length, slots, count, rows_cap, ring=ring, settings=BlockSettings(4 * dim))
    assert all(torch.equal(actual, wanted) for actual, wanted in zip(arena, expected, strict=True))
    advance(length, slots, count)
    assert torch.equal(length, in_slots(start + count))
