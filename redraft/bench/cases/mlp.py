"""kernels/mlp.py: the dense MLP's products, and the gated activation where they are the library's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from redraft.bench.cases.inputs import BF16_TOLERANCE, choices, gaussian
from redraft.bench.kernels import KernelCase, Problem, Scale
from redraft.bench.roofline import Work
from redraft.kernels.mlp import GATED, PRODUCT, gated, gated_into, gated_product_into, product_into


def activation(scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    inner = scale.config.intermediate_size
    gate_up = gaussian(scale, generator, scale.rows, 2 * inner)
    out = torch.empty(scale.rows, inner, device=scale.device, dtype=scale.dtype)
    settings = dataclasses.replace(GATED, **changes)
    return Problem(
        run=lambda: gated_into(gate_up, out, settings),
        outputs={"out": out},
        reference=lambda: {"out": gated(*gate_up.float().chunk(2, dim=-1))},
        work=Work(gate_up.nbytes + out.nbytes, 10 * out.numel()),
        tolerance=BF16_TOLERANCE,
        stock=lambda: gated(*gate_up.chunk(2, dim=-1)),
        compiles=True,
    )


def gated_product(scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    h, inner, settings = (
        scale.config.hidden_size,
        scale.config.intermediate_size,
        dataclasses.replace(PRODUCT, **changes),
    )
    x, weight = gaussian(scale, generator, scale.rows, h), gaussian(scale, generator, 2 * inner, h, std=h**-0.5)
    out = torch.empty(scale.rows, inner, device=scale.device, dtype=scale.dtype)
    return Problem(
        run=lambda: gated_product_into(x, weight, out, settings),
        outputs={"out": out},
        reference=lambda: {"out": gated(*(x.float() @ weight.float().t()).chunk(2, dim=-1))},
        work=Work(x.nbytes + weight.nbytes + out.nbytes, 4 * scale.rows * inner * h),
        tolerance=1e-2,  # both products and their activation are rounded; the interpreter cuts instead
        stock=lambda: gated(*(x @ weight.t()).chunk(2, dim=-1)),
        compiles=True,
    )


def product(scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    h, inner, settings = (
        scale.config.hidden_size,
        scale.config.intermediate_size,
        dataclasses.replace(PRODUCT, **changes),
    )
    x, weight = gaussian(scale, generator, scale.rows, inner), gaussian(scale, generator, h, inner, std=inner**-0.5)
    out = torch.empty(scale.rows, h, device=scale.device, dtype=scale.dtype)
    return Problem(
        run=lambda: product_into(x, weight, out, settings),
        outputs={"out": out},
        reference=lambda: {"out": x.float() @ weight.float().t()},
        work=Work(x.nbytes + weight.nbytes + out.nbytes, 2 * scale.rows * inner * h),
        tolerance=BF16_TOLERANCE,
        stock=lambda: x @ weight.t(),
    )


TILES = tuple(
    dict(zip(("rows", "columns", "depth", "num_warps", "num_stages"), tile, strict=True))
    for tile in ((128, 64, 64, 8, 3), (128, 64, 64, 4, 4), (128, 32, 64, 4, 4), (64, 64, 64, 4, 3), (64, 32, 64, 4, 4))
)
CASES = [
    KernelCase("mlp.gated", activation, choices(block=(512, 1024, 2048), num_warps=(4, 8))),
    KernelCase("mlp.gated_product", gated_product, TILES),
    KernelCase("mlp.product", product, TILES),
]
