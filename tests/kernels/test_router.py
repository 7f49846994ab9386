"""The router's launch: exact on exact inputs, near-optimal on random ones, the same in any batch."""

import pytest
import torch
import torch.nn.functional as F
from tolerance import DEVICE, gaussian, poisoned

from redraft.kernels.router import choose_reference, route_into, router_scratch


def run(x: torch.Tensor, proj: torch.Tensor, scale: torch.Tensor, top_k: int):
    rows, hidden = x.shape
    scratch = router_scratch(rows, hidden, proj.shape[0], DEVICE)
    weights = poisoned(rows, top_k, dtype=torch.float32)
    experts = poisoned(rows, top_k, dtype=torch.int32)
    route_into(x, proj, scale, top_k, weights=weights, experts=experts, scratch=scratch)
    assert not scratch.tickets.any(), "the next launch needs tickets at zero"
    return weights, experts


def small_integers(*shape: int) -> torch.Tensor:
    """BF16 values whose products sum without rounding, so that logits are exact and full of ties."""
    return torch.randint(-2, 3, shape, device=DEVICE).bfloat16() / 4


SHAPES = [
    (1, 64, 8, 2),
    (17, 600, 12, 3),
    (40, 300, 128, 8),
    *(pytest.param(rows, 2816, 128, 8, marks=pytest.mark.gpu) for rows in (1, 17, 255, 256, 257, 2048, 8192)),
]


@pytest.mark.parametrize(("rows", "hidden", "num_experts", "top_k"), SHAPES)
def test_exact_logits(rows, hidden, num_experts, top_k):
    """Same experts in the same order, ties to the lower id; weights to a few fp32 steps of exp and division."""
    x, proj = small_integers(rows, hidden), small_integers(num_experts, hidden)
    scale = torch.rand(num_experts, device=DEVICE).bfloat16()
    logits = (x.double() @ proj.double().T).bfloat16()
    wanted, wanted_experts = choose_reference(logits, scale, top_k)
    weights, experts = run(x, proj, scale, top_k)
    assert torch.equal(experts.long(), wanted_experts)
    torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("rows", "hidden", "num_experts", "top_k"), SHAPES)
def test_random_logits(rows, hidden, num_experts, top_k):
    """A chosen expert's logit is among the largest, up to the BF16 rounding of two logits; weights follow from it."""
    x, proj = gaussian(rows, hidden, scale=hidden**-0.5), gaussian(num_experts, hidden)
    scale = torch.rand(num_experts, device=DEVICE).bfloat16()
    weights, experts = run(x, proj, scale, top_k)
    exact = x.double() @ proj.double().T
    experts = experts.long()
    assert all(row.unique().numel() == top_k for row in experts[:100])
    step = exact.abs().max().item() * 2**-8  # half a BF16 step each way
    threshold = exact.topk(top_k, dim=-1).values[:, -1:]
    assert (exact.gather(1, experts) >= threshold - 2 * step).all()
    # Each logit may be off by a step, so each ratio of two probabilities by e^(2 step).
    shares = F.softmax(exact.gather(1, experts), dim=-1) * scale[experts].double()
    torch.testing.assert_close(weights.double(), shares, rtol=2.5 * step, atol=0)
    alone, alone_experts = run(x[-1:], proj, scale, top_k)
    assert torch.equal(alone, weights[-1:]) and torch.equal(alone_experts.long(), experts[-1:]), "alone as in a batch"


def test_ties_and_vanished_probabilities():
    """Equal logits and probabilities that underflow to zero go to the lower ids."""
    proj = torch.zeros(16, 64, device=DEVICE).bfloat16()
    x = torch.zeros(3, 64, device=DEVICE).bfloat16()
    proj[5, 0], proj[:, 1] = 1.0, -1.0
    x[1, 0], x[2, 1] = 3e4, 3e4
    weights, experts = run(x, proj, torch.ones(16, device=DEVICE).bfloat16(), 4)
    assert experts.tolist() == [[0, 1, 2, 3], [5, 0, 1, 2], [0, 1, 2, 3]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[0.25] * 4, [1.0, 0, 0, 0], [0.25] * 4]))


@pytest.mark.gpu
def test_repeats_bit_for_bit_and_alone_as_in_a_batch():
    x, proj = gaussian(8192, 2816, scale=2816**-0.5), gaussian(128, 2816)
    scale = torch.rand(128, device=DEVICE).bfloat16()
    first = run(x[:256], proj, scale, 8)
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(run(x[:256], proj, scale, 8), first, strict=True))
    for rows in (1, 1024, 2048, 8192):
        batch = run(x[:rows], proj, scale, 8)
        assert all(torch.equal(a[:256], b[:rows]) for a, b in zip(batch, first, strict=True)), rows
