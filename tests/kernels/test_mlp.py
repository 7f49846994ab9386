"""The gated activation's launch against the torch reference."""

from __future__ import annotations

import math

import pytest
import torch
from tolerance import DEVICE, assert_rounded_alike, poisoned

from redraft.kernels.mlp import gated, gated_into


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "intermediate"),
    [(1, 16), (17, 48), (3, 2112), pytest.param(257, 2112, marks=pytest.mark.gpu)],
)
def test_gated_into(rows, intermediate, dtype):
    """Against the same form in fp64, rounded like the reference; the reference's 1 + tanh loses its digits below -3.

    There the reference errs by an fp32 step of 1, so by 2^-24 * |gate * up|, gates and ups being below 3 * 6.
    """
    torch.manual_seed(0)
    gate_up = (torch.randn(rows, 2 * intermediate, device=DEVICE) * 3).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    out = poisoned(rows, intermediate, dtype=dtype)
    gated_into(gate_up, out)
    g = gate.double()
    gelu = g * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))
    assert_rounded_alike(out, gelu.to(dtype) * up)
    torch.testing.assert_close(out, gated(gate, up), rtol=2**-6 if dtype == torch.bfloat16 else 1e-5, atol=2e-5)


def test_gated_into_extremes():
    """Beyond any range of tanh the gate passes or closes; products of it with `up` overflow as in the reference."""
    gates = [0.0, -0.0, 1e-30, -1e-30, 40.0, -40.0, 3e38, -3e38, float("inf"), float("nan")]
    gate = torch.tensor(gates, device=DEVICE).bfloat16()
    up = torch.full_like(gate, 2.0)
    out = poisoned(1, len(gates), dtype=torch.bfloat16)
    gated_into(torch.cat((gate, up))[None], out)
    torch.testing.assert_close(out[0], gated(gate, up), rtol=0, atol=1e-30, equal_nan=True)
