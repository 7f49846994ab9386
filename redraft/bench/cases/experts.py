"""kernels/experts.py: both grouped products of one layer's 4-bit experts.

Slots and the combination are cases of their own. The torch side is the same experts in BF16 through torch's grouped
products, slots given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from redraft.bench.cases.inputs import choices, gaussian, routing
from redraft.bench.kernels import KernelCase, Problem, Scale
from redraft.bench.roofline import Work
from redraft.kernels.experts import EXPERTS, ExpertBuffers, expert_buffers, expert_products, expert_rows, prepare_rows
from redraft.kernels.experts_layout import repack
from redraft.kernels.packing import dequantize
from redraft.kernels.slots import assign_slots_reference
from redraft.store.dg_w4a16 import packed_bytes
from redraft.store.random import draw_experts, unpack_experts


def build(scale: Scale, generator: torch.Generator, changes: Mapping[str, Any], hopper: bool = True) -> Problem:
    config, spec, rows = scale.config, scale.spec, scale.rows
    h, inner, top_k = config.hidden_size, config.moe_intermediate_size, config.top_k_experts
    packed = draw_experts(config, spec, generator)
    experts = repack(packed, config, spec)
    x = gaussian(scale, generator, rows, h)
    sums = x.float().unflatten(1, (-1, spec.group_gate_up)).sum(dim=-1)
    _, chosen = routing(scale, generator)
    products = expert_products(h, inner, spec, scale.device) if hopper else None
    buffers = expert_buffers(rows, top_k, config.num_experts, h, inner, spec, scale.device, products)
    if isinstance(buffers, ExpertBuffers):
        buffers.settings = dataclasses.replace(EXPERTS, **changes)
    slots = assign_slots_reference(chosen.long(), config.num_experts, buffers.tile_rows)

    def reference() -> dict[str, torch.Tensor]:
        out = torch.empty(rows * top_k, h, device=scale.device)
        ends = slots.offsets.tolist()
        for e in range(config.num_experts):
            mine = slice(ends[e], ends[e + 1])
            gate_up = dequantize(packed.gu_q[e], packed.gu_s[e], packed.gu_z[e])
            gate, up = (x[slots.row_of[mine].long()].float() @ gate_up.t()).chunk(2, dim=-1)
            y = torch.nn.functional.gelu(gate, approximate="tanh") * up
            out[mine] = y @ dequantize(packed.dn_q[e], packed.dn_s[e], packed.dn_z[e]).t()
        return {"out": out}

    def run() -> None:
        prepare_rows(x, buffers)
        expert_rows(x, sums, experts, slots, buffers)

    stock = None
    if x.is_cuda:
        dense = unpack_experts(packed, scale.dtype)
        stock = lambda: expert_rows(x, sums, dense, slots, None)  # noqa: E731
    visited = min(1.0, rows * top_k / config.num_experts)
    moved = packed_bytes(config, spec) * visited + x.nbytes + buffers.out.nbytes
    return Problem(
        run=run,
        outputs={"out": buffers.out},
        reference=reference,
        work=Work(moved, 6 * rows * top_k * h * inner),
        # The activation and the output are rounded to BF16; measured 2.9e-3 on a GPU, 9e-3 in the interpreter, whose
        # conversion truncates.
        tolerance=1.2e-2,
        stock=stock,
    )


# On Hopper the first is the CUDA C++ form.
STAGES = choices(gate_up_stages=(2, 3, 4, 5), down_stages=(3, 4, 6))
CASES = [KernelCase("experts.w4", build), KernelCase("experts.w4.triton", partial(build, hopper=False), STAGES)]
