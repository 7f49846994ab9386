"""Library products that are made at once only where that changes no bit."""

from __future__ import annotations

import pytest
import torch
from tolerance import DEVICE

from redraft.kernels.products import Products


def launches(same: bool, blocks: int, trying: bool) -> list[object]:
    """What ran, for a product that gives other bits together unless `same`: of an unknown shape, then once more."""
    products, ran = Products(4), []
    x, out = torch.ones(4 * blocks, 3), torch.zeros(4 * blocks, 2)

    def together() -> None:
        ran.append("together")
        out.copy_(x[:, :2] + (0 if same else 1))

    def apart(rows: slice) -> None:
        ran.append(rows.start)
        out[rows] = x[rows, :2]

    def product() -> None:
        products.choose("key", x, out, together, apart)

    if trying:
        with products.trying():
            product()
    ran.clear()
    product()
    assert torch.equal(out, x[:, :2])
    return ran


def test_blocks_are_multiplied_together_where_that_gives_their_bits() -> None:
    assert launches(same=True, blocks=3, trying=True) == ["together"]
    assert launches(same=False, blocks=3, trying=True) == [0, 4, 8]


def test_one_block_and_shapes_that_were_not_tried() -> None:
    assert launches(same=True, blocks=1, trying=True) == [0]
    assert launches(same=True, blocks=2, trying=False) == [0, 4]


def test_only_a_trial_writes_into_the_rows() -> None:
    products, x, out = Products(4), torch.ones(8, 3), torch.zeros(8, 2)
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    products(x, weight, out)
    assert torch.equal(out, torch.tensor([[9.0, 12.0]]).expand(8, 2)) and bool((x == 1).all())
    with products.trying():
        products(x, weight, out)
    assert not bool((x == 1).any())
    torch.testing.assert_close(out, x @ weight)


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_rows_that_are_not_whole_blocks(rows: int) -> None:
    x, weight = torch.randn(rows, 5, device=DEVICE), torch.randn(5, 2, device=DEVICE)
    out = torch.full((rows, 2), torch.nan, device=DEVICE)
    Products(4)(x, weight, out)
    torch.testing.assert_close(out, x @ weight)


@pytest.mark.gpu
@pytest.mark.parametrize(("depth", "columns"), [(2816, 8192), (8192, 2816), (65536, 2816), (512, 96), (96, 1024)])
def test_a_canvas_gives_the_same_bits_beside_any_number_of_others(depth: int, columns: int) -> None:
    torch.manual_seed(depth)
    products, weight = Products(256), torch.randn(columns, depth, device=DEVICE).bfloat16().t()
    x, alone = torch.randn(4096, depth, device=DEVICE).bfloat16(), None
    for rows in (256, 512, 1024, 2048, 4096):
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device=DEVICE)
        with products.trying():
            products(x[:rows].clone(), weight, out)
        products(x[:rows], weight, out)
        alone = out[:256].clone() if alone is None else alone
        assert torch.equal(out[:256], alone), rows
