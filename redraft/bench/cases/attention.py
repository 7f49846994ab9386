"""kernels/attention.py: a canvas over the committed prefix and itself, in sliding and in full layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from redraft.bench.cases.inputs import gaussian, lanes, lengths
from redraft.bench.kernels import KernelCase, Problem, Scale
from redraft.bench.roofline import Work
from redraft.config import LayerKind
from redraft.kernels.attention import attend, attention, attention_scratch, attention_settings


def build(kind: LayerKind, scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    config, batch, n = scale.config, scale.batch, scale.config.canvas_length
    layer = next(layer for layer in config.layers if layer.kind == kind)
    heads, kv, dim = config.num_heads, layer.num_kv_heads, layer.head_dim
    window = config.sliding_window if kind == "sliding" else None
    cap = window - 1 if window else scale.prefix
    q = gaussian(scale, generator, batch, heads, n, dim, std=dim**-0.5)
    keys, values = (gaussian(scale, generator, batch, kv, cap + n, dim) for _ in range(2))
    length, slots = lengths(scale), lanes(scale)
    default = attention_settings(batch, heads, kv, n, dim)
    settings = dataclasses.replace(default, **changes)
    scratch = attention_scratch(batch, heads, n, dim, settings, scale.device)
    out = torch.empty(scale.rows, heads * dim, device=scale.device, dtype=scale.dtype)

    def seen(slot: int) -> torch.Tensor:
        """Rows that a slot's canvas attends to, in whatever order they are stored."""
        stored = torch.arange(min(int(length[slot]), cap), device=scale.device)
        return torch.cat((stored, torch.arange(cap, cap + n, device=scale.device)))

    def expected(dtype: torch.dtype) -> torch.Tensor:
        rows = []
        for b, slot in enumerate(slots.tolist()):
            k, v = (t[slot : slot + 1, :, seen(slot)].to(dtype) for t in (keys, values))
            rows.append(attention(q[b : b + 1].to(dtype), k, v, None).flatten(0, 1))
        return torch.cat(rows)

    total = sum(min(scale.prefix - b, cap) + n for b in range(batch))
    return Problem(
        run=lambda: attend(
            q, keys, values, length, slots, cap, False, window, out=out, scratch=scratch, settings=settings
        ),
        outputs={"out": out},
        reference=lambda: {"out": expected(torch.float32)},
        work=Work(q.nbytes + out.nbytes + 2 * total * kv * dim * keys.itemsize, 4 * total * n * heads * dim),
        tolerance=1e-2,  # probabilities and the output are rounded to BF16 once each
        stock=lambda: expected(scale.dtype),
    )


# (block_m, block_n, num_stages, num_warps); splits and block_d follow from the shapes
TILES = tuple(
    dict(zip(("block_m", "block_n", "num_stages", "num_warps"), tile, strict=True))
    for tile in (
        (128, 128, 1, 8),
        (128, 64, 2, 8),
        (128, 64, 3, 8),
        (128, 32, 2, 8),
        (64, 64, 2, 4),
        (64, 64, 1, 4),
        (64, 32, 2, 4),
    )
)
CASES = [KernelCase(f"attention.{kind}", partial(build, kind), TILES) for kind in ("sliding", "full")]
