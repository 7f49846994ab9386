"""kernels/self_conditioning.py: the norm between its two products, in place, and the way to the slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from redraft.bench.cases.inputs import BF16_TOLERANCE, ROWS, first_pass, gaussian, lanes, weight
from redraft.bench.kernels import KernelCase, Problem, Scale
from redraft.bench.roofline import Work
from redraft.kernels.norms import ROW, rms_norm
from redraft.kernels.self_conditioning import scatter_signal, scatter_signal_reference, soft_norm


def norm(scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    config, h = scale.config, scale.config.hidden_size
    start, w = gaussian(scale, generator, scale.rows, h, std=h**-0.5), weight(scale, generator, h)
    soft, factor = start.clone(), float(h**0.5)
    return Problem(
        run=lambda: soft_norm(soft, w, factor, config.rms_norm_eps),
        outputs={"soft": soft},
        reference=lambda: {"soft": rms_norm(start.float() * factor, w.float(), config.rms_norm_eps)},
        work=Work(2 * soft.nbytes + w.nbytes, 5 * soft.numel()),
        tolerance=BF16_TOLERANCE,
        stock=lambda: rms_norm(start * factor, w, config.rms_norm_eps),
        compiles=True,
        inplace=frozenset({"soft"}),
        reset=lambda: soft.copy_(start),
    )


def scatter(scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    rows, slots = gaussian(scale, generator, scale.rows, scale.config.hidden_size), lanes(scale)
    done, signal = first_pass(scale).done, torch.zeros_like(rows)
    settings = dataclasses.replace(ROW, **changes)
    return Problem(
        run=lambda: scatter_signal(rows, done, slots, signal, settings),
        outputs={"signal": signal},
        reference=lambda: {"signal": scatter_signal_reference(rows, done, slots, signal)},
        work=Work(2 * rows.nbytes, 0),
        tolerance=0.0,  # a copy
    )


CASES = [KernelCase("self_conditioning.norm", norm), KernelCase("self_conditioning.scatter", scatter, ROWS)]
