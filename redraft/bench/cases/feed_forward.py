"""kernels/mlp.py, router.py, slots.py and experts.py: the dense MLP, and the way of rows through the experts."""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from redraft.bench.cases.case import Changes, KernelCase, Problem, Scale, Tensors
from redraft.bench.cases.inputs import by_formula, candidates, choices, gaussian, routing
from redraft.bench.roofline import Work
from redraft.kernels.experts import EXPERTS, ExpertBuffers, expert_buffers, expert_products, expert_rows, prepare_rows
from redraft.kernels.experts_layout import TILE_ROWS, repack
from redraft.kernels.mlp import GATED, PRODUCT, gated, gated_into, gated_product_into, product_into
from redraft.kernels.packing import dequantize
from redraft.kernels.router import ROUTER, choose_reference, route_into, router_scratch
from redraft.kernels.slots import SLOTS, assign_slots, assign_slots_reference, counts_scratch, empty_slots
from redraft.store.dg_w4a16 import packed_bytes
from redraft.store.random import draw_experts, unpack_experts


def activation(scale: Scale, generator: torch.Generator, changes: Changes) -> Problem:
    """The gated activation, for where the products are the library's."""
    inner = scale.config.intermediate_size
    gate_up, out = gaussian(scale, generator, scale.rows, 2 * inner), scale.empty(scale.rows, inner)
    run = partial(gated_into, gate_up, out, replace(GATED, **changes))
    work = Work(gate_up.nbytes + out.nbytes, 10 * out.numel())
    return by_formula(run, {"out": out}, lambda x: gated(*x.chunk(2, dim=-1)), (gate_up,), work)


def gated_product(scale: Scale, generator: torch.Generator, changes: Changes) -> Problem:
    h, inner = scale.config.hidden_size, scale.config.intermediate_size
    x, weight = gaussian(scale, generator, scale.rows, h), gaussian(scale, generator, 2 * inner, h, std=h**-0.5)
    out = scale.empty(scale.rows, inner)
    run = partial(gated_product_into, x, weight, out, replace(PRODUCT, **changes))
    work = Work(x.nbytes + weight.nbytes + out.nbytes, 4 * scale.rows * inner * h)
    # Both products and their activation are rounded; the interpreter cuts instead.
    return by_formula(run, {"out": out}, lambda x, w: gated(*(x @ w.t()).chunk(2, dim=-1)), (x, weight), work, 1e-2)


def product(scale: Scale, generator: torch.Generator, changes: Changes) -> Problem:
    h, inner = scale.config.hidden_size, scale.config.intermediate_size
    x, weight = gaussian(scale, generator, scale.rows, inner), gaussian(scale, generator, h, inner, std=inner**-0.5)
    out = scale.empty(scale.rows, h)
    run = partial(product_into, x, weight, out, replace(PRODUCT, **changes))
    work = Work(x.nbytes + weight.nbytes + out.nbytes, 2 * scale.rows * inner * h)
    return by_formula(run, {"out": out}, lambda x, weight: x @ weight.t(), (x, weight), work, compiles=False)


def router(scale: Scale, generator: torch.Generator, changes: Changes) -> Problem:
    """From the normed residual to each row's experts and their weights."""
    config, rows, h = scale.config, scale.rows, scale.config.hidden_size
    top_k, experts = config.top_k_experts, config.num_experts
    # Small whole numbers have exact products, so that the order of a sum cannot turn a choice around.
    x = torch.randint(-2, 3, (rows, h), generator=generator, device=scale.device).to(scale.dtype)
    proj = torch.randint(-1, 2, (experts, h), generator=generator, device=scale.device).to(scale.dtype) * 2.0**-6
    per_expert = 1 + 0.1 * gaussian(scale, generator, experts)
    weights = torch.empty(rows, top_k, device=scale.device)
    outputs = {"weights": weights, "experts": torch.empty_like(weights, dtype=torch.int32)}
    scratch = router_scratch(rows, h, experts, scale.device, replace(ROUTER, **changes))

    def reference() -> Tensors:
        logits = F.linear(x.float(), proj.float()).to(scale.dtype)
        return dict(zip(outputs, choose_reference(logits, per_expert, top_k), strict=True))

    def stock() -> object:
        p = F.softmax(F.linear(x, proj), dim=-1, dtype=torch.float32)
        top, ids = torch.topk(p, top_k, dim=-1)
        return top / top.sum(dim=-1, keepdim=True) * per_expert[ids], ids

    return Problem(
        run=partial(route_into, x, proj, per_expert, top_k, **outputs, scratch=scratch),
        outputs=outputs,
        reference=reference,
        work=Work(x.nbytes + proj.nbytes + sum(t.nbytes for t in outputs.values()), 2 * rows * h * experts),
        tolerance=1e-5,  # fp32 exponentials and one division, after logits equal bit for bit
        stock=stock,
        compiles=True,
    )


def slots(scale: Scale, generator: torch.Generator, changes: Changes) -> Problem:
    """Which rows stand next to each other before the experts."""
    experts, count = routing(scale, generator)[1], scale.config.num_experts
    shape = (scale.rows, scale.config.top_k_experts, count)
    outputs = vars(empty_slots(*shape, TILE_ROWS, scale.device))
    counts, settings = counts_scratch(*shape, scale.device), replace(SLOTS, **changes)
    return Problem(
        run=partial(assign_slots, experts, count, TILE_ROWS, **outputs, counts=counts, settings=settings),
        outputs=outputs,
        reference=lambda: vars(assign_slots_reference(experts.long(), count, TILE_ROWS)),
        work=Work(experts.nbytes + sum(t.nbytes for t in outputs.values()), 0),
        tolerance=0.0,
        stock=lambda: experts.flatten().long().sort(stable=True),  # the heart of the usual alignment
    )


def grouped(scale: Scale, generator: torch.Generator, changes: Changes, hopper: bool = True) -> Problem:
    """Both grouped products of one layer's 4-bit experts; slots and the combination are cases of their own.

    The torch side is the same experts in BF16 through torch's grouped products, slots given.
    """
    config, spec, rows = scale.config, scale.spec, scale.rows
    h, inner, top_k = config.hidden_size, config.moe_intermediate_size, config.top_k_experts
    packed = draw_experts(config, spec, generator)
    experts = repack(packed, config, spec)
    x = gaussian(scale, generator, rows, h)
    sums = x.float().unflatten(1, (-1, spec.group_gate_up)).sum(dim=-1)
    chosen = routing(scale, generator)[1]
    products = expert_products(h, inner, spec, scale.device) if hopper else None
    buffers = expert_buffers(rows, top_k, config.num_experts, h, inner, spec, scale.device, products)
    if isinstance(buffers, ExpertBuffers):
        buffers.settings = replace(EXPERTS, **changes)
    assigned = assign_slots_reference(chosen.long(), config.num_experts, buffers.tile_rows)

    def reference() -> Tensors:
        out, ends = torch.empty(rows * top_k, h, device=scale.device), assigned.offsets.tolist()
        for e in range(config.num_experts):
            mine = slice(ends[e], ends[e + 1])
            gate_up = dequantize(packed.gu_q[e], packed.gu_s[e], packed.gu_z[e])
            y = gated(*(x[assigned.row_of[mine].long()].float() @ gate_up.t()).chunk(2, dim=-1))
            out[mine] = y @ dequantize(packed.dn_q[e], packed.dn_s[e], packed.dn_z[e]).t()
        return {"out": out}

    def run() -> None:
        prepare_rows(x, buffers)
        expert_rows(x, sums, experts, assigned, buffers)

    dense = unpack_experts(packed, scale.dtype) if x.is_cuda else None
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
        stock=None if dense is None else lambda: expert_rows(x, sums, dense, assigned, None),
    )


PRODUCT_TILES = candidates(
    "rows columns depth num_warps num_stages", (128, 64, 64, 8, 3), (128, 64, 64, 4, 4), (128, 32, 64, 4, 4),
    (64, 64, 64, 4, 3), (64, 32, 64, 4, 4),
)  # fmt: skip
STAGES = choices(gate_up_stages=(2, 3, 4, 5), down_stages=(3, 4, 6))
CASES = [
    KernelCase("mlp.gated", activation, choices(block=(512, 1024, 2048), num_warps=(4, 8))),
    KernelCase("mlp.gated_product", gated_product, PRODUCT_TILES),
    KernelCase("mlp.product", product, PRODUCT_TILES),
    KernelCase("router", router, choices(chunk=(256, 512, 1024), num_stages=(2, 4), num_warps=(4, 8))),
    KernelCase("slots", slots, choices(num_warps=(2, 4, 8))),
    KernelCase("experts.w4", grouped),  # on Hopper the CUDA C++ form
    KernelCase("experts.w4.triton", partial(grouped, hopper=False), STAGES),
]
