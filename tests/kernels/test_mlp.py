"""The gated activation's launch against the torch reference."""

import math

import pytest
import torch
from tolerance import DEVICE, assert_rounded_alike, gaussian, poisoned, relative

from redraft.kernels.launch import INTERPRET
from redraft.kernels.mlp import PRODUCT, ProductSettings, gated, gated_into, gated_product_into, product_into


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "intermediate"), [(1, 16), (17, 48), (3, 2112), pytest.param(257, 2112, marks=pytest.mark.gpu)]
)
def test_gated_into(rows, intermediate, dtype):
    """Against the same form in fp64, rounded like the reference; the reference's 1 + tanh loses its digits below -3.

    There the reference errs by an fp32 step of 1, so by 2^-24 * |gate * up|, gates and ups being below 3 * 6.
    """
    gate_up = gaussian(rows, 2 * intermediate, dtype=dtype, scale=3)
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


# Narrow, so that the interpreter has several tiles of few numbers.
NARROW = ProductSettings(rows=32, columns=16, depth=32, num_warps=4, num_stages=2)


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "settings"),
    [
        (1, 32, 16, NARROW),
        (33, 72, 24, NARROW),  # no whole tile in any direction
        (64, 64, 48, NARROW),
        pytest.param(256, 2816, 2112, PRODUCT, marks=pytest.mark.gpu),
        pytest.param(257, 2112, 2816, PRODUCT, marks=pytest.mark.gpu),
    ],
)
def test_products(rows, depth, columns, settings):
    """Against fp64 on outputs full of NaN: one rounding of the product, three of the gated one, 2^-9 of a value each.

    The interpreter cuts instead of rounding: twice that.
    """
    x, weight = gaussian(rows, depth), gaussian(2 * columns, depth, scale=depth**-0.5)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    tolerance = 2**-8 if INTERPRET.value else 2**-9
    plain, out, again = (poisoned(rows, columns, dtype=torch.bfloat16) for _ in range(3))
    product_into(x, weight[:columns], plain, settings)
    assert relative(plain, gate) < tolerance
    gated_product_into(x, weight, out, settings)
    assert relative(out, gated(gate, up)) < 2 * tolerance
    gated_product_into(x, weight, again, settings)
    assert torch.equal(out, again)


def test_a_row_that_is_not_finite_stays_alone():
    x, weight, out = gaussian(40, 32), gaussian(32, 32), poisoned(40, 16, dtype=torch.bfloat16)
    x[7, 3] = float("nan")
    gated_product_into(x, weight, out, NARROW)
    assert out.isfinite().all(dim=1).logical_not().nonzero().flatten().tolist() == [7]
