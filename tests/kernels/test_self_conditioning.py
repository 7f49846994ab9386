"""Self-conditioning against its torch reference and against model.py."""

import math

import pytest
import torch
from tolerance import DEVICE, assert_rounded_alike, gaussian, in_slots, poisoned, slot_table, temperature

from redraft.config import DecodeSettings
from redraft.kernels import self_conditioning
from redraft.kernels.norms import rms_norm
from redraft.kernels.products import Products
from redraft.kernels.sampling import probabilities, sample
from redraft.kernels.self_conditioning import SelfConditioningBuffers, self_condition, self_condition_reference
from redraft.kernels.state import SlotState
from redraft.network.weights import SelfConditioningWeights

EPS = 1e-6


def make_weights(hidden, intermediate):
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    matrices = (gaussian(*shape, scale=shape[-1] ** -0.5) for shape in shapes)
    return SelfConditioningWeights(1 + gaussian(hidden, scale=hidden**-0.5), *matrices)


def sqrt_bf16(hidden):
    return float(torch.tensor(hidden**0.5, dtype=torch.bfloat16))


def run(probs, embed, weights, done=(0,)):
    """The signal by slot, after one poisoned slot more, and lanes with these bits of `done`, last first."""
    rows, hidden = probs.shape[0], embed.shape[1]
    buffers = SelfConditioningBuffers.allocate(rows, hidden, weights.down_proj.shape[1], embed.dtype, DEVICE)
    for tensor in vars(buffers).values():
        tensor.fill_(math.nan)
    gate_up, slots = torch.cat((weights.gate_proj, weights.up_proj)), slot_table(len(done))
    signal = poisoned(rows + rows // len(done), hidden, dtype=embed.dtype)
    done = in_slots(torch.tensor(done, dtype=torch.int32, device=DEVICE))
    self_condition(probs, embed, weights, gate_up, done, slots, sqrt_bf16(hidden), EPS, buffers, signal, Products(rows))
    return signal.view(-1, rows // slots.shape[0], hidden)


@pytest.mark.parametrize("hidden", [96, 128])
def test_against_reference(hidden):
    """A slot that is done keeps what it has, and so does one without a lane."""
    count, vocab = 3, 40
    weights, embed = make_weights(hidden, 64), gaussian(vocab, hidden)
    probs = (torch.randn(3 * count, vocab, device=DEVICE) * 3).softmax(-1).bfloat16()
    expected = self_condition_reference(probs, embed, weights, EPS).view(3, count, hidden)
    signal = run(probs, embed, weights, done=(0, 2, 0))
    assert signal[[0, 2]].isnan().all()
    # Two more matrix products after the first rounding.
    assert_rounded_alike(signal[[3, 1]], expected[[0, 2]], share=0.9)


@pytest.mark.parametrize("rows", [1, 17])
def test_soft_norm(rows):
    soft, weight = gaussian(2 * rows, 100), gaussian(100)
    soft[0], soft[rows] = 0.0, math.nan
    scale = sqrt_bf16(100)
    expected = rms_norm(soft * torch.tensor(scale).bfloat16(), weight, EPS)
    self_conditioning.soft_norm(soft, weight, scale, EPS)
    assert_rounded_alike(soft, expected)


@pytest.mark.parametrize("hidden", [32, 100])
def test_scatter_signal(hidden):
    rows, before = gaussian(4 * 3, hidden), gaussian(6 * 3, hidden)
    done = torch.tensor([0, 1, 0, 0, 0, 2], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([4, 1, 5, 0], dtype=torch.int32, device=DEVICE)
    expected = before.clone().view(6, 3, hidden)
    expected[4], expected[0] = rows[:3], rows[9:]
    assert torch.equal(self_conditioning.scatter_signal_reference(rows, done, slots, before), expected.flatten(0, 1))
    self_conditioning.scatter_signal(rows, done, slots, before)
    assert torch.equal(before.view(6, 3, hidden), expected)


def test_from_the_logits_of_the_pass_before():
    """sample, probabilities and self_condition together are model.py's softmax of the scaled logits and its MLP."""
    count, vocab, hidden = 2, 200, 64
    weights, state, slots = make_weights(hidden, 32), SlotState.allocate(2, DEVICE), slot_table(1)
    state.done[1], state.step[1], state.temperature[1] = 0, 2, temperature(DecodeSettings(), 3)
    embed, logits = gaussian(vocab, hidden), gaussian(count, vocab, scale=6)
    scaled = torch.tanh(logits.float() / 30) * 30 / temperature(DecodeSettings(), 3)
    probs = scaled.softmax(-1, dtype=torch.float32).bfloat16()
    expected = self_condition_reference(probs, embed, weights, EPS)
    out = {name: torch.empty(count, dtype=torch.int32, device=DEVICE) for name in ("draw", "argmax")}
    out |= {name: torch.empty(count, device=DEVICE) for name in ("entropy", "confidence", "log_norm")}
    sample(logits, state, slots, 30.0, **out)
    probabilities(logits, out["log_norm"], state, slots, 30.0, out=logits)
    assert_rounded_alike(logits, probs)
    signal = run(logits, embed, weights)[1]
    # A probability next to a rounding boundary may go either way: 2^-8 of it, through three matrix products.
    torch.testing.assert_close(signal.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 255, 256, 257])
def test_real_shapes(rows):
    """Relative RMS error against fp64 arithmetic: a handful of BF16 roundings, 2^-9 / sqrt(3) each."""
    vocab, hidden, intermediate = 262_144, 2816, 2112
    weights, embed = make_weights(hidden, intermediate), gaussian(vocab, hidden, scale=0.03)
    probs = (torch.randn(rows, vocab, device=DEVICE) * 4).softmax(-1).bfloat16()
    signal = run(probs, embed, weights)[1]
    soft = torch.cat([probs.double() @ part.double() for part in embed.split(704, dim=1)], dim=1)
    normed = rms_norm(soft.float() * sqrt_bf16(hidden), weights.pre_norm.float(), EPS)
    gate, up = normed @ weights.gate_proj.float().t(), normed @ weights.up_proj.float().t()
    exact = (torch.nn.functional.gelu(gate, approximate="tanh") * up) @ weights.down_proj.float().t()
    assert (signal.float() - exact).square().mean().sqrt() < 8e-3 * exact.square().mean().sqrt()
    assert torch.equal(signal, run(probs, embed, weights)[1])
