"""Attention over the arena against an fp64 softmax over the keys each query may see."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tolerance import DEVICE, in_slots, slot_table

from redraft.kernels.attention import attend, attention, attention_scratch, attention_settings
from redraft.kernels.tables import Gpu

# fp32 tiles test the addressing. On a GPU their products are TF32, 2^-11 of values of order one.
CLOSE = {"rtol": 1e-5, "atol": 1e-5} if DEVICE.type == "cpu" else {"rtol": 5e-3, "atol": 5e-3}


def arena(batch, kv_heads, rows_cap, rows_max, dim, dtype):
    """Keys and values full of NaN, as memory may be where nothing was written."""
    return torch.full((2, batch, kv_heads, rows_cap + rows_max, dim), math.nan, dtype=dtype, device=DEVICE)


def make_case(lengths, rows_cap, rows, heads, kv_heads, dim, dtype=torch.float32, rows_max=None, scale=1.0):
    """Random history per slot written into an arena; returns q, the arena, and the whole history [B, kv, L + N, D]."""
    batch, total = len(lengths), max(lengths) + rows
    history = torch.randn(2, batch, kv_heads, total, dim, device=DEVICE).to(dtype)
    store = arena(batch, kv_heads, rows_cap, rows_max or rows, dim, dtype)
    for b, length in enumerate(lengths):
        for p in range(max(0, length - rows_cap), length):
            store[:, b, :, p % rows_cap] = history[:, b, :, p]
        store[:, b, :, rows_cap : rows_cap + rows] = history[:, b, :, length : length + rows]
    q = (torch.randn(batch, heads, rows, dim, device=DEVICE) * scale / dim**0.5).to(dtype)
    return q, store, history


def reference(q, history, lengths, rows_cap, causal, window):
    """fp64, slot by slot, over positions in order."""
    outs = []
    for b, length in enumerate(lengths):
        rows = q.shape[2]
        position = torch.arange(length + rows, device=q.device)
        query = length + torch.arange(rows, device=q.device)[:, None]
        visible = (position >= length - rows_cap).expand(rows, -1)
        if causal:
            visible = visible & (position <= query)
            if window is not None:
                visible = visible & (query - position < window)
        k, v = history[:, b : b + 1, :, : length + rows].double()
        outs.append(attention(q[b : b + 1].double(), k, v, visible[None, None]))
    return torch.cat(outs).flatten(0, 1)


def launch(q, store, lengths, rows_cap, causal, window, settings):
    batch, heads, rows, dim = q.shape
    out = torch.full((batch * rows, heads * dim), math.nan, dtype=q.dtype, device=q.device)
    exact = torch.float32 if q.dtype == torch.float32 else torch.float16
    scratch = attention_scratch(batch, heads, rows, dim, settings, q.device, exact)
    if scratch is not None:
        for tensor in scratch:
            tensor.fill_(math.nan)
    length = in_slots(torch.tensor(lengths, dtype=torch.int32, device=q.device))
    keys, values, slots = in_slots(store[0]), in_slots(store[1]), slot_table(batch)
    attend(q, keys, values, length, slots, rows_cap, causal, window, out=out, scratch=scratch, settings=settings)
    return out


def small(q, store, splits, block_m=16):
    """Tiles small enough that every loop of the kernel runs more than once."""
    settings = attention_settings(q.shape[0], q.shape[1], store.shape[2], q.shape[2], q.shape[3])
    return replace(settings, block_m=block_m, block_n=16, splits=splits)


# Empty, shorter than the ring, exactly full, wrapped once and many times.
@pytest.mark.parametrize("lengths", [[0, 3], [15, 16], [40, 7]])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, 16), (True, 5)])
@pytest.mark.parametrize("splits", [1, 3])
def test_sliding(lengths, causal, window, splits):
    """A ring of 15 rows, with room for three more in-flight rows than the pass has."""
    torch.manual_seed(sum(lengths) + splits)
    q, store, history = make_case(lengths, 15, 17, 4, 2, 16, rows_max=20)
    out = launch(q, store, lengths, 15, causal, window, small(q, store, splits))
    expected = reference(q, history, lengths, 15, causal, window)
    torch.testing.assert_close(out.double(), expected, **CLOSE)


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("splits", [1, 2])
def test_full(rows, causal, splits):
    """Eight query heads a KV head; output columns made in two halves."""
    torch.manual_seed(rows)
    lengths = [0, 29, 64]
    q, store, history = make_case(lengths, 64, rows, 8, 1, 32, rows_max=20)
    settings = replace(small(q, store, splits), block_d=16)
    out = launch(q, store, lengths, 64, causal, None, settings)
    torch.testing.assert_close(out.double(), reference(q, history, lengths, 64, causal, None), **CLOSE)


def test_transposed_queries():
    torch.manual_seed(4)
    q, store, _ = make_case([9], 15, 5, 4, 2, 16)
    settings = small(q, store, 1)
    view = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert not view.is_contiguous()
    expected = launch(q, store, [9], 15, False, None, settings)
    assert torch.equal(launch(view, store, [9], 15, False, None, settings), expected)


def test_huge_scores_pick_one_key():
    """Scores of +-1e4 would overflow an exponential taken before the maximum is subtracted."""
    torch.manual_seed(5)
    q, store, history = make_case([20], 32, 9, 4, 2, 16, scale=1e4)
    for splits in (1, 2):
        out = launch(q, store, [20], 32, False, None, small(q, store, splits))
        torch.testing.assert_close(out.double(), reference(q, history, [20], 32, False, None), rtol=1e-3, atol=1e-3)


def test_bf16():
    """P and the output are rounded to BF16: 2^-8 each (the interpreter truncates) of values of order one."""
    torch.manual_seed(6)
    q, store, history = make_case([20, 3], 15, 9, 4, 2, 16, dtype=torch.bfloat16)
    out = launch(q, store, [20, 3], 15, False, None, small(q, store, 2))
    torch.testing.assert_close(out.double(), reference(q, history, [20, 3], 15, False, None), rtol=2e-2, atol=2e-2)


def test_a_slot_does_not_depend_on_the_others():
    torch.manual_seed(7)
    lengths = [5, 30, 12]
    q, store, _ = make_case(lengths, 15, 9, 4, 2, 16)
    settings = small(q, store, 2)
    together = launch(q, store, lengths, 15, False, None, settings).view(3, 9, -1)
    for b, length in enumerate(lengths):
        one = slice(b, b + 1)
        alone = launch(q[one], store[:, one].contiguous(), [length], 15, False, None, settings)
        assert torch.equal(together[b], alone)


@pytest.mark.parametrize("batch", [1, 2, 4, 16])
def test_settings_fill_an_h200_once(batch):
    sliding, full = attention_settings(batch, 16, 8, 256, 256), attention_settings(batch, 16, 2, 256, 512)
    assert (sliding.block_m, sliding.block_n, sliding.block_d) == (128, 64, 256)
    assert (full.block_m, full.block_n, full.block_d) == (128, 32, 256)
    assert [sliding.splits, full.splits] == {1: [4, 2], 2: [2, 1], 4: [1, 1], 16: [1, 1]}[batch]


def test_settings_fit_a_smaller_gpu():
    for dim, kv_heads in ((256, 8), (512, 2)):
        s = attention_settings(1, 16, kv_heads, 256, dim, Gpu("small", 82, 101_376))
        assert 2 * (s.block_m * dim + s.num_stages * s.block_n * (dim + s.block_d)) <= 101_376


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_heads", "dim"), [(8, 256), (2, 512)])
@pytest.mark.parametrize("rows", [1, 17, 255, 256, 257])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[1024], [0, 1, 700, 1023, 1500]])
def test_real_shapes(kv_heads, dim, rows, causal, lengths):
    """BF16 P and output: each rounding is 2^-9 of its value; outputs are averages of many unit normals, below 4."""
    torch.manual_seed(rows)
    sliding = dim == 256
    rows_cap, window = (1023, 1024) if sliding else (1536, None)
    q, store, history = make_case(lengths, rows_cap, rows, 16, kv_heads, dim, torch.bfloat16, rows_max=257)
    settings = attention_settings(len(lengths), 16, kv_heads, rows, dim)
    out = launch(q, store, lengths, rows_cap, causal, window if causal else None, settings)
    expected = reference(q, history, lengths, rows_cap, causal, window if causal else None)
    error = out.double() - expected
    assert error.pow(2).mean().sqrt() < 4e-3 * expected.pow(2).mean().sqrt()
    assert error.abs().max() < 3e-2
    again = launch(q, store, lengths, rows_cap, causal, window if causal else None, settings)
    assert torch.equal(out, again)
