"""Both forms of attention over the arena against an fp64 softmax over the keys each query may see."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from tolerance import DEVICE, gaussian, in_slots, poisoned, slot_table

from redraft.kernels import attention_canvas
from redraft.kernels.attention import attend, attention, attention_scratch, attention_settings
from redraft.kernels.attention_canvas import CanvasSettings, attend_canvas, canvas_scratch, canvas_settings

# fp32 tiles test the addressing. On a GPU their products are TF32, 2^-11 of values of order one.
CLOSE = {"rtol": 1e-5, "atol": 1e-5} if DEVICE.type == "cpu" else {"rtol": 5e-3, "atol": 5e-3}


CANVAS = "canvas"  # in the place of a number of splits
WINDOWS = [(False, None), (True, 16), (True, 5)]


class Case:
    """Random history of every slot, in an arena that is NaN elsewhere, as memory may be where nothing was written."""

    def __init__(self, lengths, rows_cap, rows, heads, kv_heads, dim, dtype=torch.float32, rows_max=None, scale=1.0):
        batch, total = len(lengths), max(lengths) + rows
        self.lengths, self.rows_cap, self.shape = lengths, rows_cap, (batch, heads, kv_heads, rows, dim)
        self.history = gaussian(2, batch, kv_heads, total, dim, dtype=dtype)
        self.store = poisoned(2, batch, kv_heads, rows_cap + (rows_max or rows), dim, dtype=dtype)
        for b, length in enumerate(lengths):
            for p in range(max(0, length - rows_cap), length):
                self.store[:, b, :, p % rows_cap] = self.history[:, b, :, p]
            self.store[:, b, :, rows_cap : rows_cap + rows] = self.history[:, b, :, length : length + rows]
        self.q = gaussian(batch, heads, rows, dim, dtype=dtype, scale=scale / dim**0.5)

    def alone(self, b):
        """One slot of it."""
        return self.some(slice(b, b + 1))

    def some(self, slots):
        """These slots of it."""
        case = copy.copy(self)
        case.q, case.store, case.lengths = self.q[slots], self.store[:, slots].contiguous(), self.lengths[slots]
        case.shape = (len(case.lengths), *self.shape[1:])
        return case

    def small(self, splits):
        """Tiles small enough that every loop of the kernels runs more than once."""
        if splits == CANVAS:
            return replace(canvas_settings(*self.shape), block_m=16, block_n=16, block_k=16, block_d=16, num_warps=4)
        return replace(attention_settings(*self.shape), block_m=16, block_n=16, splits=splits)

    def reference(self, causal, window):
        """fp64, slot by slot, over positions in order."""
        outs, rows = [], self.q.shape[2]
        for b, length in enumerate(self.lengths):
            position = torch.arange(length + rows, device=DEVICE)
            query = length + torch.arange(rows, device=DEVICE)[:, None]
            visible = (position >= length - self.rows_cap).expand(rows, -1)
            if causal:
                visible = visible & (position <= query)
                if window is not None:
                    visible = visible & (query - position < window)
            k, v = self.history[:, b : b + 1, :, : length + rows].double()
            outs.append(attention(self.q[b : b + 1].double(), k, v, visible[None, None]))
        return torch.cat(outs).flatten(0, 1)

    def launch(self, settings, causal=False, window=None, scratch_rows=None):
        """In one launch or, by settings of canvases, in two. Lanes in slots of `slot_table`, all else full of NaN."""
        batch, heads, rows, dim = self.q.shape
        out = poisoned(batch * rows, heads * dim, dtype=self.q.dtype)
        length = in_slots(torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE))
        where = (self.q, *map(in_slots, self.store), length, slot_table(batch), self.rows_cap)
        if isinstance(settings, CanvasSettings):
            longest = scratch_rows or self.rows_cap
            scratch = canvas_scratch(batch, heads, rows, longest, settings, DEVICE, self.q.dtype)
            for tensor in (scratch.weights, scratch.stats):
                tensor.fill_(math.nan)
            attend_canvas(*where, out=out, scratch=scratch, settings=settings)
            return out
        exact = torch.float32 if self.q.dtype == torch.float32 else torch.float16
        shares = attention_scratch(batch, heads, rows, dim, settings, DEVICE, exact)
        for tensor in shares or ():
            tensor.fill_(math.nan)
        attend(*where, causal, window, out=out, scratch=shares, settings=settings)
        return out

    def check(self, settings, causal=False, window=None, close=CLOSE, scratch_rows=None):
        out = self.launch(settings, causal, window, scratch_rows)
        torch.testing.assert_close(out.double(), self.reference(causal, window), **close)


# Empty, shorter than the ring, exactly full, wrapped once and many times.
@pytest.mark.parametrize("lengths", [[0, 3], [15, 16], [40, 7]])
@pytest.mark.parametrize(
    ("causal", "window", "splits", "rows"),
    [*((*seen, splits, 17) for seen in WINDOWS for splits in (1, 3)), *((False, None, CANVAS, n) for n in (1, 17))],
)
def test_sliding(lengths, causal, window, splits, rows):
    """A ring of 15 rows, with room for three more in-flight rows than the pass may have."""
    case = Case(lengths, 15, rows, 4, 2, 16, rows_max=20)
    case.check(case.small(splits), causal, window)


@pytest.mark.parametrize(
    ("rows", "causal", "splits"),
    [*((n, causal, splits) for n in (1, 17) for causal in (False, True) for splits in (1, 2)), (17, False, CANVAS)],
)
def test_full(rows, causal, splits):
    """Eight query heads a KV head; output columns made in two halves, of canvases scores too."""
    case = Case([0, 29, 64], 64, rows, 8, 1, 32, rows_max=20)
    case.check(replace(case.small(splits), block_d=16), causal)


@pytest.mark.parametrize("splits", [1, CANVAS])
def test_transposed_queries(splits):
    case = Case([9], 15, 5, 4, 2, 16)
    expected = case.launch(case.small(splits))
    case.q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert not case.q.is_contiguous()
    assert torch.equal(case.launch(case.small(splits)), expected)


@pytest.mark.parametrize("splits", [1, 2, CANVAS])
def test_huge_scores_pick_one_key(splits):
    """Scores of +-1e4 would overflow an exponential taken before the maximum is subtracted.

    In canvases they stand in another block than the first: blocks whose weights all vanish, sums that start over.
    """
    case = Case([20], 32, 9, 4, 2, 16, scale=1e4)
    case.check(case.small(splits), close={"rtol": 1e-3, "atol": 1e-3})


@pytest.mark.parametrize("splits", [2, CANVAS])
def test_bf16(splits):
    """P and the output are rounded to BF16: 2^-8 each (the interpreter truncates) of values of order one."""
    case = Case([20, 3], 15, 9, 4, 2, 16, dtype=torch.bfloat16)
    case.check(case.small(splits), close={"rtol": 2e-2, "atol": 2e-2})


def test_a_slot_does_not_depend_on_the_others():
    case = Case([5, 30, 12], 15, 9, 4, 2, 16)
    for b, together in enumerate(case.launch(case.small(2)).view(3, 9, -1)):
        assert torch.equal(together, case.alone(b).launch(case.small(2)))


def test_lanes_take_turns_in_scratch(monkeypatch):
    case = Case([5, 30, 12], 15, 9, 4, 2, 16)
    settings = case.small(CANVAS)
    together = case.launch(settings)
    for at_once in (1, 2):
        lane_bytes = 4 * 9 * 2 * settings.block_n * 4
        monkeypatch.setattr(attention_canvas, "SCRATCH_BYTES", at_once * lane_bytes)
        assert canvas_scratch(3, 4, 9, 15, settings, DEVICE, case.q.dtype).lanes == at_once
        assert torch.equal(case.launch(settings), together)


def test_scratch_of_a_longer_prefix():
    """The blocks of a lane stand as far apart as the scratch was made for."""
    case = Case([20, 33], 40, 9, 4, 2, 16)
    case.check(case.small(CANVAS), scratch_rows=100)


@pytest.mark.parametrize("batch", [1, 2, 4, 16])
def test_settings_fill_an_h200_once(batch):
    sliding, full = attention_settings(batch, 16, 8, 256, 256), attention_settings(batch, 16, 2, 256, 512)
    assert (sliding.block_m, sliding.block_d) == {1: (64, 128), 2: (64, 256)}.get(batch, (128, 256))
    assert (full.block_m, full.block_d) == (64 if batch == 1 else 128, 256)
    # What a row's sum depends on is the same for every number of lanes.
    assert [(s.block_n, s.splits) for s in (sliding, full)] == [(64, 1), (32, 1)]
    assert attention_settings(batch, 16, 2, 1, 512).splits == 8
    sliding, full = canvas_settings(batch, 16, 8, 256, 256), canvas_settings(batch, 16, 2, 256, 512)
    assert (sliding.block_m, sliding.block_d, full.block_d) == (128, 64 if batch == 1 else 128, 128)
    for s in (sliding, full):
        assert 2 * s.value_stages * s.block_n * (s.block_m + s.block_d) <= 232_448


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_heads", "dim", "window"), [(8, 256, 1024), (2, 512, None)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_lane_gives_the_same_bits_beside_any_number_of_others(kv_heads, dim, window, causal):
    lengths = [1500, 0, 700, 1023, 5, 1024, 2000, 31] * 2
    case = Case(lengths, 1023 if window else 2048, 256, 16, kv_heads, dim, torch.bfloat16)
    alone = None
    for lanes in (1, 2, 4, 16):
        few = case.some(slice(lanes))
        out = few.launch(attention_settings(*few.shape), causal, window if causal else None)[:256]
        alone = out if alone is None else alone
        assert torch.equal(out, alone)


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_heads", "dim"), [(8, 256), (2, 512)])
@pytest.mark.parametrize("rows", [1, 17, 255, 256, 257])
@pytest.mark.parametrize(("causal", "canvas"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("lengths", [[1024], [0, 1, 700, 1023, 1500]])
def test_real_shapes(kv_heads, dim, rows, causal, canvas, lengths):
    """BF16 P and output: each rounding is 2^-9 of its value; outputs are averages of many unit normals, below 4."""
    rows_cap, window = (1023, 1024 if causal else None) if dim == 256 else (1536, None)
    case = Case(lengths, rows_cap, rows, 16, kv_heads, dim, torch.bfloat16, rows_max=257)
    settings = (canvas_settings if canvas else attention_settings)(*case.shape)
    out, expected = case.launch(settings, causal, window), case.reference(causal, window)
    error = out.double() - expected
    assert error.pow(2).mean().sqrt() < 4e-3 * expected.pow(2).mean().sqrt()
    assert error.abs().max() < 3e-2
    assert torch.equal(out, case.launch(settings, causal, window))
