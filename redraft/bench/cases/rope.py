"""kernels/rope.py: norms and rotation of q and k, the norm of v, and their way into the arena."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from redraft.bench.cases.inputs import choices, gaussian, lanes, lengths, weight
from redraft.bench.kernels import KernelCase, Problem, Scale
from redraft.bench.roofline import Work
from redraft.config import LayerKind
from redraft.kernels.rope import ROPE, inverse_frequencies, qkv_norm_rope, qkv_norm_rope_reference


def build(kind: LayerKind, scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    config, batch, n = scale.config, scale.batch, scale.config.canvas_length
    layer = next(layer for layer in config.layers if layer.kind == kind)
    heads, kv, dim = config.num_heads, layer.num_kv_heads, layer.head_dim
    parts = heads + kv * (2 if kind == "sliding" else 1)
    cap = config.sliding_window - 1 if kind == "sliding" else scale.prefix
    qkv = gaussian(scale, generator, scale.rows, parts * dim)
    q_weight, k_weight = (weight(scale, generator, dim) for _ in range(2))
    freq, length, slots = inverse_frequencies(layer).to(scale.device), lengths(scale), lanes(scale)
    settings = dataclasses.replace(ROPE, **changes)
    q = torch.empty(batch, heads, n, dim, device=scale.device, dtype=scale.dtype)
    keys, values = (torch.zeros(batch, kv, cap + n, dim, device=scale.device, dtype=scale.dtype) for _ in range(2))

    def reference(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        a, b, c = (t.to(dtype) for t in (qkv, q_weight, k_weight))
        out = qkv_norm_rope_reference(a, b, c, freq, length, slots, config.rms_norm_eps, heads=heads, kv_heads=kv)
        q, k, v = out
        return {"q": q, "k": k.flip(0), "v": v.flip(0)}

    return Problem(
        run=lambda: qkv_norm_rope(
            qkv, q_weight, k_weight, freq, length, slots, config.rms_norm_eps,
            q_out=q, keys=keys, values=values, rows_cap=cap, settings=settings,
        ),
        outputs={"q": q, "k": keys[:, :, cap:], "v": values[:, :, cap:]},
        reference=reference,
        work=Work(qkv.nbytes + q.nbytes + 2 * keys[:, :, cap:].numel() * keys.itemsize, 12 * qkv.numel()),
        tolerance=1e-2,  # five roundings to BF16, as the network's order of operations has them
        stock=lambda: reference(scale.dtype),
        compiles=True,
    )  # fmt: skip


BLOCKS = choices(block_elements=(1024, 2048, 4096), num_warps=(2, 4, 8))
CASES = [KernelCase(f"rope.{kind}", partial(build, kind), BLOCKS) for kind in ("sliding", "full")]
