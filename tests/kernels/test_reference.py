"""The torch references of norms, rope, attention, router, MLP and experts against hand-written arithmetic."""

import math

import pytest
import torch

from redraft.config import LayerConfig, QuantSpec
from redraft.kernels.attention import attention
from redraft.kernels.experts import run_experts
from redraft.kernels.mlp import gated_mlp
from redraft.kernels.norms import rms_norm
from redraft.kernels.rope import inverse_frequencies, rope_table, rotate
from redraft.kernels.router import route
from redraft.network.weights import DenseExperts
from redraft.quant.rtn import quantize_experts
from redraft.store.random import unpack_experts


def test_rms_norm_by_hand():
    x = torch.tensor([[3.0, 4.0]])
    expected = torch.tensor([[3.0, 4.0]]) / math.sqrt(12.5)
    torch.testing.assert_close(rms_norm(x, None, 0.0), expected)
    torch.testing.assert_close(rms_norm(x, torch.tensor([2.0, -1.0]), 0.0), expected * torch.tensor([2.0, -1.0]))


def test_rms_norm_rounds_once():
    """BF16 input is normalised and scaled in fp32; rounding between the two would move about a third of the values."""
    x, weight = torch.randn(64, 128).bfloat16(), torch.randn(128).bfloat16()
    exact = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    assert (rms_norm(x, weight, 1e-6) == exact.bfloat16()).float().mean() > 0.999


def test_rope_turns_by_the_relative_distance():
    layer = LayerConfig("sliding", 8, 1, 1e4, 1.0)
    q, k = torch.randn(2, 8)
    freq = inverse_frequencies(layer)
    torch.testing.assert_close(freq, torch.tensor([1.0, 0.1, 0.01, 0.001]))

    def score(i: int, j: int) -> torch.Tensor:
        table = rope_table(freq, torch.tensor([i, j]), torch.float32)
        turned = rotate(torch.stack((q, k))[None, :, None], table)[0, :, 0]
        return turned[0] @ turned[1]

    torch.testing.assert_close(score(3, 1), score(103, 101), rtol=1e-4, atol=1e-4)
    assert abs(score(3, 1) - score(4, 1)) > 1e-3


def test_proportional_rope_leaves_the_tail_still():
    layer = LayerConfig("full", 16, 1, 1e6, 0.25)
    freq = inverse_frequencies(layer)
    torch.testing.assert_close(freq, torch.tensor([1.0, 1e6 ** (-2 / 16), 0, 0, 0, 0, 0, 0]))
    x = torch.arange(1.0, 17).view(1, 1, 1, 16)
    turned = rotate(x, rope_table(freq, torch.tensor([7]), torch.float32))[0, 0, 0]
    untouched = [*range(2, 8), *range(10, 16)]
    assert torch.equal(turned[untouched], x[0, 0, 0][untouched])
    torch.testing.assert_close(turned[0], torch.tensor(1 * math.cos(7) - 9 * math.sin(7)))
    torch.testing.assert_close(turned[8], torch.tensor(9 * math.cos(7) + 1 * math.sin(7)))


@pytest.mark.parametrize("masked", [False, True])
def test_attention_against_loops(masked):
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.rand(2, 1, 3, 5) > 0.4 if masked else None
    if mask is not None:
        mask[..., 0] = True
    out = attention(q, k, v, mask).view(2, 3, 4, 8)
    for b in range(2):
        for h in range(4):
            for n in range(3):
                scores = k[b, h // 2] @ q[b, h, n]
                if mask is not None:
                    scores = scores.masked_fill(~mask[b, 0, n], -math.inf)
                torch.testing.assert_close(out[b, n, h], scores.softmax(0) @ v[b, h // 2], rtol=1e-4, atol=1e-5)


def test_router_by_hand():
    """Logits are proj @ (x / rms * scale / sqrt(H)); weights renormalise to one before per_expert_scale."""
    x = torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    proj = torch.tensor([[1.0, 0, 0, 0], [3.0, 0, 0, 0], [2.0, 0, 0, 0]])
    scale, per_expert = torch.tensor([0.5, 1, 1, 1]), torch.tensor([10.0, 1.0, 100.0])
    weights, experts = route(x, proj, scale, per_expert, top_k=2, eps=0.0)
    # rms of x is 1, so the normed input is [2, ...] * 0.5 / 2 = 0.5: logits 0.5, 1.5, 1.0
    share = 1 / (1 + math.exp(-0.5))
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[share, (1 - share) * 100]]))


def _expert_loop(x, gate_up, down, weights, index):
    out = torch.zeros_like(x, dtype=torch.float64)
    half = gate_up.shape[1] // 2
    for t in range(x.shape[0]):
        for w, e in zip(weights[t], index[t], strict=True):
            gate, up = gate_up[e, :half], gate_up[e, half:]
            out[t] += w.double() * gated_mlp(x[t].double(), gate.double(), up.double(), down[e].double())
    return out


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("routing", ["spread", "one expert takes all"])
def test_experts_against_loops(rows, routing):
    gate_up, down = torch.randn(6, 32, 32) * 0.3, torch.randn(6, 32, 16) * 0.3
    x, weights = torch.randn(rows, 32), torch.rand(rows, 2)
    index = torch.stack([torch.randperm(6)[:2] for _ in range(rows)])
    if routing != "spread":
        index = torch.tensor([[4, 0]]).expand(rows, 2)
    dense = run_experts(x, DenseExperts(gate_up, down), weights, index)
    torch.testing.assert_close(dense.double(), _expert_loop(x, gate_up, down, weights, index), rtol=1e-4, atol=1e-5)

    packed = quantize_experts(gate_up, down, QuantSpec(16, 8))
    restored = unpack_experts(packed, torch.float32)
    assert torch.equal(run_experts(x, packed, weights, index), run_experts(x, restored, weights, index))


def test_experts_do_not_depend_on_other_rows():
    """The sum over a token's experts keeps its order whoever else is in the batch."""
    experts = DenseExperts(torch.randn(6, 32, 32).double(), torch.randn(6, 32, 16).double())
    x, weights = torch.randn(9, 32).double(), torch.rand(9, 3).double()
    index = torch.stack([torch.randperm(6)[:3] for _ in range(9)])
    together = run_experts(x, experts, weights, index)
    for row in range(9):
        alone = run_experts(x[row : row + 1], experts, weights[row : row + 1], index[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-12, atol=1e-12)
