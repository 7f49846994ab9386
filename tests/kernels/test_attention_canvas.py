"""Two-launch attention of canvases against an fp64 softmax over the keys each query may see."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from test_attention import CLOSE, make_case, reference
from tolerance import in_slots, slot_table

from redraft.kernels import attention_canvas
from redraft.kernels.attention_canvas import attend_canvas, canvas_scratch, canvas_settings


def launch(q, store, lengths, rows_cap, settings, scratch_rows=None):
    batch, heads, rows, dim = q.shape
    out = torch.full((batch * rows, heads * dim), math.nan, dtype=q.dtype, device=q.device)
    scratch = canvas_scratch(batch, heads, rows, scratch_rows or rows_cap, settings, q.device, q.dtype)
    scratch.weights.fill_(math.nan)
    scratch.stats.fill_(math.nan)
    length = in_slots(torch.tensor(lengths, dtype=torch.int32, device=q.device))
    keys, values, slots = in_slots(store[0]), in_slots(store[1]), slot_table(batch)
    attend_canvas(q, keys, values, length, slots, rows_cap, out=out, scratch=scratch, settings=settings)
    return out


def small(q, store):
    """Tiles small enough that every loop of the kernels runs more than once."""
    settings = canvas_settings(q.shape[0], q.shape[1], store.shape[2], q.shape[2], q.shape[3])
    return replace(settings, block_m=16, block_n=16, block_k=16, block_d=16, num_warps=4)


# Empty, shorter than the prefix region, exactly full, wrapped once and many times.
@pytest.mark.parametrize("lengths", [[0, 3], [15, 16], [40, 7]])
@pytest.mark.parametrize("rows", [1, 17])
def test_ring(lengths, rows):
    """A ring of 15 rows, with room for three more in-flight rows than the pass may have."""
    torch.manual_seed(sum(lengths))
    q, store, history = make_case(lengths, 15, rows, 4, 2, 16, rows_max=20)
    out = launch(q, store, lengths, 15, small(q, store))
    torch.testing.assert_close(out.double(), reference(q, history, lengths, 15, False, None), **CLOSE)


def test_long_prefix():
    """Eight query heads a KV head, depth and output columns in two parts."""
    torch.manual_seed(1)
    lengths = [0, 29, 64]
    q, store, history = make_case(lengths, 64, 17, 8, 1, 32, rows_max=20)
    out = launch(q, store, lengths, 64, small(q, store))
    torch.testing.assert_close(out.double(), reference(q, history, lengths, 64, False, None), **CLOSE)


def test_transposed_queries():
    torch.manual_seed(4)
    q, store, _ = make_case([9], 15, 5, 4, 2, 16)
    view = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert not view.is_contiguous()
    settings = small(q, store)
    assert torch.equal(launch(view, store, [9], 15, settings), launch(q, store, [9], 15, settings))


def test_huge_scores_pick_one_key():
    """Scores of +-1e4 in another block than the first: blocks whose weights all vanish, sums that start over."""
    torch.manual_seed(5)
    q, store, history = make_case([20], 32, 9, 4, 2, 16, scale=1e4)
    out = launch(q, store, [20], 32, small(q, store))
    torch.testing.assert_close(out.double(), reference(q, history, [20], 32, False, None), rtol=1e-3, atol=1e-3)


def test_bf16():
    """P and the output are rounded to BF16: 2^-8 each (the interpreter truncates) of values of order one."""
    torch.manual_seed(6)
    q, store, history = make_case([20, 3], 15, 9, 4, 2, 16, dtype=torch.bfloat16)
    out = launch(q, store, [20, 3], 15, small(q, store))
    torch.testing.assert_close(out.double(), reference(q, history, [20, 3], 15, False, None), rtol=2e-2, atol=2e-2)


def test_lanes_take_turns_in_scratch(monkeypatch):
    torch.manual_seed(7)
    lengths = [5, 30, 12]
    q, store, _ = make_case(lengths, 15, 9, 4, 2, 16)
    settings = small(q, store)
    together = launch(q, store, lengths, 15, settings)
    for at_once in (1, 2):
        slot_bytes = 4 * 9 * 2 * settings.block_n * 4
        monkeypatch.setattr(attention_canvas, "SCRATCH_BYTES", at_once * slot_bytes)
        assert canvas_scratch(3, 4, 9, 15, settings, q.device, q.dtype).lanes == at_once
        assert torch.equal(launch(q, store, lengths, 15, settings), together)


def test_scratch_of_a_longer_prefix():
    """The blocks of a lane stand as far apart as the scratch was made for."""
    torch.manual_seed(8)
    lengths = [20, 33]
    q, store, history = make_case(lengths, 40, 9, 4, 2, 16)
    out = launch(q, store, lengths, 40, small(q, store), scratch_rows=100)
    torch.testing.assert_close(out.double(), reference(q, history, lengths, 40, False, None), **CLOSE)


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_settings_fill_an_h200(batch):
    sliding, full = canvas_settings(batch, 16, 8, 256, 256), canvas_settings(batch, 16, 2, 256, 512)
    assert (sliding.block_m, sliding.block_d, full.block_d) == (128, 64 if batch == 1 else 128, 128)
    for s in (sliding, full):
        assert 2 * s.value_stages * s.block_n * (s.block_m + s.block_d) <= 232_448


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_heads", "dim"), [(8, 256), (2, 512)])
@pytest.mark.parametrize("rows", [1, 17, 255, 256, 257])
@pytest.mark.parametrize("lengths", [[1024], [0, 1, 700, 1023, 1500]])
def test_real_shapes(kv_heads, dim, rows, lengths):
    """BF16 P and output: each rounding is 2^-9 of its value; outputs are averages of many unit normals, below 4."""
    torch.manual_seed(rows)
    rows_cap = 1023 if dim == 256 else 1536
    q, store, history = make_case(lengths, rows_cap, rows, 16, kv_heads, dim, torch.bfloat16, rows_max=257)
    settings = canvas_settings(len(lengths), 16, kv_heads, rows, dim)
    out = launch(q, store, lengths, rows_cap, settings)
    expected = reference(q, history, lengths, rows_cap, False, None)
    error = out.double() - expected
    assert error.pow(2).mean().sqrt() < 4e-3 * expected.pow(2).mean().sqrt()
    assert error.abs().max() < 3e-2
    assert torch.equal(launch(q, store, lengths, rows_cap, settings), out)
