"""kernels/mlp.py: the gated activation between the two products of the dense MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from redraft.bench.cases.inputs import BF16_TOLERANCE, gaussian
from redraft.bench.kernels import KernelCase, Problem, Scale
from redraft.bench.roofline import Work
from redraft.kernels.mlp import gated, gated_into


def build(scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    inner = scale.config.intermediate_size
    gate_up = gaussian(scale, generator, scale.rows, 2 * inner)
    out = torch.empty(scale.rows, inner, device=scale.device, dtype=scale.dtype)
    return Problem(
        run=lambda: gated_into(gate_up, out),
        outputs={"out": out},
        reference=lambda: {"out": gated(*gate_up.float().chunk(2, dim=-1))},
        work=Work(gate_up.nbytes + out.nbytes, 10 * out.numel()),
        tolerance=BF16_TOLERANCE,
        stock=lambda: gated(*gate_up.chunk(2, dim=-1)),
        compiles=True,
    )


CASES = [KernelCase("mlp.gated", build)]
