"""The RMSNorm launches against compositions of the torch reference."""

import pytest
import torch
from tolerance import DEVICE, assert_all_rounded_alike, assert_rounded_alike, gaussian, in_slots, poisoned, slot_table

from redraft.kernels import norms

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]
REAL = pytest.param(256, 2816, torch.bfloat16, marks=pytest.mark.gpu)
LONG = pytest.param(8192, 2816, torch.bfloat16, marks=pytest.mark.gpu)
SHAPES = [(1, 64, torch.float32), (17, 192, torch.bfloat16), (3, 2816, torch.bfloat16), REAL, LONG]


def check_rms_norm(x, weight):
    out = poisoned(*x.shape, dtype=x.dtype)
    norms.rms_norm_into(x, weight, EPS, out)
    assert_rounded_alike(out, norms.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [1, 17])
def test_rms_norm_into(rows, weighted, dtype):
    wide = gaussian(rows, 300, dtype=dtype, scale=5)
    check_rms_norm(wide[:, :100], gaussian(100, dtype=dtype) if weighted else None)


def test_rms_norm_of_extreme_rows():
    """Zeros stay zero; squares that overflow fp32, inf and NaN end as in the reference."""
    x = torch.zeros(5, 64, device=DEVICE).bfloat16()
    x[1, 3], x[2, 5], x[3, 7], x[4] = 3e38, float("inf"), float("nan"), 1e-30
    check_rms_norm(x, None)


@pytest.mark.gpu
def test_rms_norm_real_shape():
    check_rms_norm(gaussian(257, 2816), gaussian(2816))


@pytest.mark.parametrize(("rows", "hidden", "dtype"), SHAPES)
@pytest.mark.parametrize(("with_signal", "normed"), [(True, True), (False, True), (False, False)])
def test_embed_norms(rows, hidden, dtype, with_signal, normed):
    vocab = 262_144 if hidden == 2816 and DEVICE.type == "cuda" else 50
    embed, weight = gaussian(vocab, hidden, dtype=dtype, scale=0.1), gaussian(hidden, dtype=dtype)
    tokens = torch.randint(0, vocab, (rows,), device=DEVICE)
    tokens[0] = vocab - 1
    inputs = (tokens, embed, torch.tensor(hidden**0.5, dtype=dtype).item(), EPS, weight)
    of_slots = {}
    if with_signal:  # one lane, of the second of two slots
        inputs = (in_slots(tokens[None]).flatten(), *inputs[1:])
        signal = in_slots(gaussian(1, rows, hidden, dtype=dtype)).flatten(0, 1)
        of_slots = {"slots": slot_table(1), "signal": signal, "step": in_slots(torch.ones(1, device=DEVICE).int())}
    x, next_in = (poisoned(rows, hidden, dtype=dtype) for _ in range(2))
    norms.embed_norms(*inputs, normed=normed, x=x, next_in=next_in, **of_slots)
    assert_all_rounded_alike((x, next_in), norms.embed_norms_reference(*inputs, normed=normed, **of_slots))


@pytest.mark.parametrize("with_signal", [False, True])
def test_embed_norms_reads_what_slots_hold(with_signal):
    """Three lanes of four slots, not in order; the one on its first pass does not see the NaN that is its signal."""
    length, hidden = 5, 64
    embed, weight, signal = gaussian(50, hidden), gaussian(hidden), gaussian(3, length, hidden)
    tokens = torch.randint(0, 50, (3, length), device=DEVICE)
    signal[1] = float("nan")
    step = torch.tensor([1, 0, 7], dtype=torch.int32, device=DEVICE)
    x, next_in = (poisoned(3 * length, hidden, dtype=torch.bfloat16) for _ in range(2))
    seen = {"signal": in_slots(signal).flatten(0, 1)} if with_signal else {}
    given = {"normed": True, "slots": slot_table(3), "step": in_slots(step), **seen}
    inputs = (in_slots(tokens).flatten(), embed, 8.0, EPS, weight)
    norms.embed_norms(*inputs, x=x, next_in=next_in, **given)
    alone = torch.where(step[:, None, None] > 0, signal, 0.0) if with_signal else torch.zeros_like(signal)
    rows = torch.nn.functional.embedding(tokens.flatten(), embed) * 8.0 + alone.flatten(0, 1)
    assert_rounded_alike(x, norms.rms_norm(rows, None, EPS))
    assert_all_rounded_alike((x, next_in), norms.embed_norms_reference(*inputs, **given))


@pytest.mark.parametrize(("rows", "hidden", "dtype"), SHAPES)
def test_residual_norms(rows, hidden, dtype):
    group = 128 if hidden == 2816 else 32
    x, delta = (gaussian(rows, hidden, dtype=dtype, scale=scale) for scale in (20, 3))
    weights = [gaussian(hidden, dtype=dtype) for _ in range(4)]
    expected = norms.residual_norms_reference(x, delta, *weights, EPS, group)
    outputs = {name: poisoned(rows, hidden, dtype=dtype) for name in ("dense_in", "expert_in", "router_in")}
    sums = poisoned(rows, hidden // group, dtype=torch.float32)
    norms.residual_norms(x, delta, *weights, EPS, **outputs, group_sums=sums, group_size=group)
    assert_all_rounded_alike((x, *outputs.values()), expected[:4])
    # The sums belong to the expert_in that was written; 128 fp32 additions of values near 1 err by some 1e-6 each.
    exact = outputs["expert_in"].double().unflatten(-1, (-1, group)).sum(-1)
    torch.testing.assert_close(sums.double(), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize(("rows", "hidden", "dtype"), SHAPES)
def test_combine_norms(rows, hidden, dtype, top_k):
    x, dense = (gaussian(rows, hidden, dtype=dtype, scale=scale) for scale in (20, 1))
    expert_rows = gaussian(rows * top_k, hidden, dtype=dtype)
    slot_of = torch.randperm(rows * top_k, device=DEVICE).int()
    routing = torch.rand(rows, top_k, device=DEVICE)
    *weights, next_weight = (gaussian(hidden, dtype=dtype) for _ in range(4))
    scalar = torch.tensor([0.7], device=DEVICE).to(dtype)
    inputs = (dense, expert_rows, slot_of, routing, *weights, scalar, next_weight, EPS)
    expected = norms.combine_norms_reference(x, *inputs)
    next_in = poisoned(rows, hidden, dtype=dtype)
    again, again_in = x.clone(), next_in.clone()
    norms.combine_norms(x, *inputs, next_in=next_in)
    assert_all_rounded_alike((x, next_in), expected)
    norms.combine_norms(again, *inputs, next_in=again_in)
    assert torch.equal(again, x) and torch.equal(again_in, next_in)
