"""kernels/attention.py and attention_canvas.py: a canvas, or one row, over the committed prefix and itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from redraft.bench.cases.inputs import choices, gaussian, lanes, lengths
from redraft.bench.kernels import KernelCase, Problem, Scale
from redraft.bench.roofline import Work
from redraft.config import LayerKind
from redraft.kernels.attention import attend, attention, attention_scratch, attention_settings
from redraft.kernels.attention_canvas import attend_canvas, canvas_scratch, canvas_settings


def build(
    kind: LayerKind, scale: Scale, generator: torch.Generator, changes: Mapping[str, Any], *,
    canvas: bool = False, step: bool = False,
) -> Problem:  # fmt: skip
    """canvas: by the two launches of attention_canvas.py. step: of one row a lane instead of a canvas."""
    config, batch, n = scale.config, scale.batch, 1 if step else scale.config.canvas_length
    layer = next(layer for layer in config.layers if layer.kind == kind)
    heads, kv, dim = config.num_heads, layer.num_kv_heads, layer.head_dim
    window = config.sliding_window if kind == "sliding" else None
    cap = window - 1 if window else scale.prefix
    q = gaussian(scale, generator, batch, heads, n, dim, std=dim**-0.5)
    keys, values = (gaussian(scale, generator, batch, kv, cap + n, dim) for _ in range(2))
    length, slots = lengths(scale), lanes(scale)
    out = torch.empty(batch * n, heads * dim, device=scale.device, dtype=scale.dtype)

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

    shape = (batch, heads, kv, n, dim)
    if canvas:
        two = dataclasses.replace(canvas_settings(*shape), **changes)
        blocks = canvas_scratch(batch, heads, n, cap, two, scale.device, scale.dtype)
        run = partial(attend_canvas, q, keys, values, length, slots, cap, out=out, scratch=blocks, settings=two)
    else:
        one = dataclasses.replace(attention_settings(*shape), **changes)
        shares = attention_scratch(batch, heads, n, dim, one, scale.device)
        given = (q, keys, values, length, slots, cap, False, window)
        run = partial(attend, *given, out=out, scratch=shares, settings=one)

    total = sum(min(scale.prefix - b, cap) + n for b in range(batch))
    return Problem(
        run=run,
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
CANVAS_TILES = choices(block_d=(64, 128), weight_stages=(2, 3), value_stages=(2, 3, 4))
STEP_TILES = choices(block_n=(32, 64, 128), num_stages=(1, 2, 3), num_warps=(4,))
CASES = [
    KernelCase("attention.sliding", partial(build, "sliding"), TILES),
    KernelCase("attention.full", partial(build, "full"), TILES),
    KernelCase("attention.step", partial(build, "full", step=True), STEP_TILES),
    KernelCase("attention_canvas", partial(build, "full", canvas=True), CANVAS_TILES),
]
