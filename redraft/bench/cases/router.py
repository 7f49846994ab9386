"""kernels/router.py: from the normed residual to each row's experts and their weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from redraft.bench.cases.inputs import choices, gaussian
from redraft.bench.kernels import KernelCase, Problem, Scale
from redraft.bench.roofline import Work
from redraft.kernels.router import ROUTER, choose_reference, route_into, router_scratch


def build(scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    config, rows, h = scale.config, scale.rows, scale.config.hidden_size
    top_k, experts = config.top_k_experts, config.num_experts
    # Small whole numbers have exact products, so that the order of a sum cannot turn a choice around.
    x = torch.randint(-2, 3, (rows, h), generator=generator, device=scale.device).to(scale.dtype)
    proj = torch.randint(-1, 2, (experts, h), generator=generator, device=scale.device).to(scale.dtype)
    proj = proj * 2.0**-6
    per_expert = 1 + 0.1 * gaussian(scale, generator, experts)
    weights = torch.empty(rows, top_k, device=scale.device)
    chosen = torch.empty(rows, top_k, device=scale.device, dtype=torch.int32)
    scratch = router_scratch(rows, h, experts, scale.device, dataclasses.replace(ROUTER, **changes))

    def reference() -> dict[str, torch.Tensor]:
        logits = F.linear(x.float(), proj.float()).to(scale.dtype)
        share, ids = choose_reference(logits, per_expert, top_k)
        return {"weights": share, "experts": ids}

    def stock() -> object:
        p = F.softmax(F.linear(x, proj), dim=-1, dtype=torch.float32)
        top, ids = torch.topk(p, top_k, dim=-1)
        return top / top.sum(dim=-1, keepdim=True) * per_expert[ids], ids

    return Problem(
        run=lambda: route_into(x, proj, per_expert, top_k, weights=weights, experts=chosen, scratch=scratch),
        outputs={"weights": weights, "experts": chosen},
        reference=reference,
        work=Work(x.nbytes + proj.nbytes + weights.nbytes + chosen.nbytes, 2 * rows * h * experts),
        tolerance=1e-5,  # fp32 exponentials and one division, after logits equal bit for bit
        stock=stock,
        compiles=True,
    )


CASES = [KernelCase("router", build, choices(chunk=(256, 512, 1024), num_stages=(2, 4), num_warps=(4, 8)))]
