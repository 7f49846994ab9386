"""kernels/slots.py: which rows stand next to each other before the experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from redraft.bench.cases.inputs import choices, routing
from redraft.bench.kernels import KernelCase, Problem, Scale
from redraft.bench.roofline import Work
from redraft.kernels.experts_layout import TILE_ROWS
from redraft.kernels.slots import SLOTS, assign_slots, assign_slots_reference, counts_scratch, empty_slots


def build(scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    config, rows = scale.config, scale.rows
    _, experts = routing(scale, generator)
    shape = (rows, config.top_k_experts, config.num_experts)
    slots = empty_slots(*shape, TILE_ROWS, scale.device)
    counts = counts_scratch(*shape, scale.device)
    settings = dataclasses.replace(SLOTS, **changes)
    return Problem(
        run=lambda: assign_slots(
            experts, config.num_experts, TILE_ROWS, **vars(slots), counts=counts, settings=settings
        ),
        outputs=vars(slots),
        reference=lambda: vars(assign_slots_reference(experts.long(), config.num_experts, TILE_ROWS)),
        work=Work(experts.nbytes + sum(t.nbytes for t in vars(slots).values()), 0),
        tolerance=0.0,
        stock=lambda: experts.flatten().long().sort(stable=True),  # the heart of the usual alignment
    )


CASES = [KernelCase("slots", build, choices(num_warps=(2, 4, 8)))]
