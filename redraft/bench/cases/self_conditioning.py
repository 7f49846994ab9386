"""kernels/self_conditioning.py: the norm between its two products, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from redraft.bench.cases.inputs import BF16_TOLERANCE, first_pass, gaussian, weight
from redraft.bench.kernels import KernelCase, Problem, Scale
from redraft.bench.roofline import Work
from redraft.kernels.norms import rms_norm
from redraft.kernels.self_conditioning import soft_norm


def build(scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    config, h = scale.config, scale.config.hidden_size
    start, w = gaussian(scale, generator, scale.rows, h, std=h**-0.5), weight(scale, generator, h)
    soft, slots, factor = start.clone(), first_pass(scale), float(h**0.5)
    slots.step.fill_(1)  # a first pass would write zeros
    return Problem(
        run=lambda: soft_norm(soft, w, slots, config.canvas_length, factor, config.rms_norm_eps),
        outputs={"soft": soft},
        reference=lambda: {"soft": rms_norm(start.float() * factor, w.float(), config.rms_norm_eps)},
        work=Work(2 * soft.nbytes + w.nbytes, 5 * soft.numel()),
        tolerance=BF16_TOLERANCE,
        stock=lambda: rms_norm(start * factor, w, config.rms_norm_eps),
        compiles=True,
        inplace=frozenset({"soft"}),
        reset=lambda: soft.copy_(start),
    )


CASES = [KernelCase("self_conditioning.norm", build)]
