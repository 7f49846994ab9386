"""kernels/kv_write.py: a finished canvas becomes part of the prefix."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from redraft.bench.cases.inputs import choices, gaussian, lanes
from redraft.bench.kernels import KernelCase, Problem, Scale
from redraft.bench.roofline import Work
from redraft.config import LayerKind
from redraft.kernels.kv_write import COMMIT, commit_rows, commit_rows_reference


def build(kind: LayerKind, scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    config, batch, n = scale.config, scale.batch, scale.config.canvas_length
    layer = next(layer for layer in config.layers if layer.kind == kind)
    ring = kind == "sliding"
    cap = config.sliding_window - 1 if ring else scale.prefix + n
    start = [gaussian(scale, generator, batch, layer.num_kv_heads, cap + n, layer.head_dim) for _ in range(2)]
    keys, values = (t.clone() for t in start)
    slots = lanes(scale)
    length, count = (torch.full((batch,), c, dtype=torch.int32, device=scale.device) for c in (scale.prefix, n))

    settings = dataclasses.replace(COMMIT, **changes)

    def reference() -> dict[str, torch.Tensor]:
        expected = {name: t.clone() for name, t in zip(("keys", "values"), start, strict=True)}
        commit_rows_reference(**expected, length=length, slots=slots, count=count, rows_cap=cap, ring=ring)
        return expected

    def reset() -> None:
        for tensor, first in zip((keys, values), start, strict=True):
            tensor.copy_(first)

    moved = 2 * batch * layer.num_kv_heads * n * layer.head_dim * keys.itemsize
    return Problem(
        run=lambda: commit_rows(keys, values, length, slots, count, cap, ring=ring, settings=settings),
        outputs={"keys": keys, "values": values},
        reference=reference,
        work=Work(2 * moved, 0),
        tolerance=0.0,  # a copy
        inplace=frozenset({"keys", "values"}),
        reset=reset,
    )


BLOCKS = choices(block_elements=(2048, 4096, 8192), num_warps=(4, 8))
CASES = [KernelCase(f"kv_write.{kind}", partial(build, kind), BLOCKS) for kind in ("sliding", "full")]
