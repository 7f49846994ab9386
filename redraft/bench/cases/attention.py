"""kernels/rope.py, attention.py, attention_canvas.py and kv_write.py: queries, keys and values on their way."""

from dataclasses import replace
from functools import partial

import torch

from redraft.bench.cases.case import Changes, KernelCase, Problem, Scale
from redraft.bench.cases.inputs import by_formula, candidates, choices, gaussian, lanes, lengths, weight
from redraft.bench.roofline import Work
from redraft.config import LayerKind
from redraft.kernels.attention import attend, attention, attention_scratch, attention_settings
from redraft.kernels.attention_canvas import attend_canvas, canvas_scratch, canvas_settings
from redraft.kernels.kv_write import COMMIT, commit_rows, commit_rows_reference
from redraft.kernels.rope import ROPE, inverse_frequencies, qkv_norm_rope, qkv_norm_rope_reference


def rope(kind: LayerKind, scale: Scale, generator: torch.Generator, changes: Changes) -> Problem:
    """Norms and rotation of q and k, the norm of v, and their way into the arena."""
    config, layer, batch, n = scale.config, scale.layer(kind), scale.batch, scale.config.canvas_length
    heads, kv, dim = config.num_heads, layer.num_kv_heads, layer.head_dim
    parts = heads + kv * (2 if kind == "sliding" else 1)
    cap = config.sliding_window - 1 if kind == "sliding" else scale.prefix
    qkv = gaussian(scale, generator, scale.rows, parts * dim)
    q_weight, k_weight = (weight(scale, generator, dim) for _ in range(2))
    given = (qkv, q_weight, k_weight, inverse_frequencies(layer).to(scale.device), lengths(scale), lanes(scale))
    q = scale.empty(batch, heads, n, dim)
    keys, values = (torch.zeros(batch, kv, cap + n, dim, device=scale.device, dtype=scale.dtype) for _ in range(2))
    outputs = {"q": q, "k": keys[:, :, cap:], "v": values[:, :, cap:]}
    eps, settings = config.rms_norm_eps, replace(ROPE, **changes)
    run = partial(qkv_norm_rope, *given, eps, q_out=q, keys=keys, values=values, rows_cap=cap, settings=settings)
    by_lane = partial(qkv_norm_rope_reference, eps=eps, heads=heads, kv_heads=kv)

    def formula(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = by_lane(*tensors)
        return q, k.flip(0), v.flip(0)

    work = Work(qkv.nbytes + sum(t.nbytes for t in outputs.values()), 12 * qkv.numel())
    # Five roundings to BF16, as the network's order of operations has them.
    return by_formula(run, outputs, formula, given, work, tolerance=1e-2)


def attended(
    kind: LayerKind, scale: Scale, generator: torch.Generator, changes: Changes, *, canvas: bool = False,
    step: bool = False,
) -> Problem:  # fmt: skip
    """A canvas, or one row, over the committed prefix and itself.

    canvas: by the two launches of attention_canvas.py. step: of one row a lane instead of a canvas.
    """
    config, batch, n = scale.config, scale.batch, 1 if step else scale.config.canvas_length
    layer = scale.layer(kind)
    heads, kv, dim = config.num_heads, layer.num_kv_heads, layer.head_dim
    window = config.sliding_window if kind == "sliding" else None
    cap = window - 1 if window else scale.prefix
    q = gaussian(scale, generator, batch, heads, n, dim, std=dim**-0.5)
    keys, values = (gaussian(scale, generator, batch, kv, cap + n, dim) for _ in range(2))
    length, slots, out = lengths(scale), lanes(scale), scale.empty(batch * n, heads * dim)

    def formula(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        rows = []
        for b, slot in enumerate(slots.tolist()):
            stored = torch.arange(min(int(length[slot]), cap), device=scale.device)
            seen = torch.cat((stored, torch.arange(cap, cap + n, device=scale.device)))  # in whatever order
            k, v = (t[slot : slot + 1, :, seen] for t in (keys, values))
            rows.append(attention(q[b : b + 1], k, v, None).flatten(0, 1))
        return torch.cat(rows)

    shape, given = (batch, heads, kv, n, dim), (q, keys, values, length, slots, cap)
    if canvas:
        two = replace(canvas_settings(*shape), **changes)
        blocks = canvas_scratch(batch, heads, n, cap, two, scale.device, scale.dtype)
        run = partial(attend_canvas, *given, out=out, scratch=blocks, settings=two)
    else:
        one = replace(attention_settings(*shape), **changes)
        shares = attention_scratch(batch, heads, n, dim, one, scale.device)
        run = partial(attend, *given, False, window, out=out, scratch=shares, settings=one)
    total = sum(min(scale.prefix - b, cap) + n for b in range(batch))
    work = Work(q.nbytes + out.nbytes + 2 * total * kv * dim * keys.itemsize, 4 * total * n * heads * dim)
    # Probabilities and the output are rounded to BF16 once each.
    return by_formula(run, {"out": out}, formula, (q, keys, values), work, tolerance=1e-2, compiles=False)


def kv_write(kind: LayerKind, scale: Scale, generator: torch.Generator, changes: Changes) -> Problem:
    """A finished canvas becomes part of the prefix."""
    config, layer, batch, n = scale.config, scale.layer(kind), scale.batch, scale.config.canvas_length
    ring, kv, dim = kind == "sliding", layer.num_kv_heads, layer.head_dim
    cap = config.sliding_window - 1 if ring else scale.prefix + n
    starts = {name: gaussian(scale, generator, batch, kv, cap + n, dim) for name in ("keys", "values")}
    outputs = {name: t.clone() for name, t in starts.items()}
    length, count = (torch.full((batch,), c, dtype=torch.int32, device=scale.device) for c in (scale.prefix, n))
    given = {"length": length, "slots": lanes(scale), "count": count}

    def reference() -> dict[str, torch.Tensor]:
        expected = {name: t.clone() for name, t in starts.items()}
        commit_rows_reference(**expected, **given, rows_cap=cap, ring=ring)
        return expected

    return Problem(
        run=partial(commit_rows, **outputs, **given, rows_cap=cap, ring=ring, settings=replace(COMMIT, **changes)),
        outputs=outputs,
        reference=reference,
        work=Work(4 * batch * kv * n * dim * scale.dtype.itemsize, 0),
        tolerance=0.0,  # a copy
        starts=starts,
    )


KINDS: tuple[LayerKind, ...] = ("sliding", "full")
# splits and block_d follow from the shapes
TILES = candidates(
    "block_m block_n num_stages num_warps", (128, 128, 1, 8), (128, 64, 2, 8), (128, 64, 3, 8), (128, 32, 2, 8),
    (64, 64, 2, 4), (64, 64, 1, 4), (64, 32, 2, 4),
)  # fmt: skip
CANVAS_TILES = choices(block_d=(64, 128), weight_stages=(2, 3), value_stages=(2, 3, 4))
STEP_TILES = choices(block_n=(32, 64, 128), num_stages=(1, 2, 3), num_warps=(4,))
ROPE_BLOCKS = choices(block_elements=(1024, 2048, 4096), num_warps=(2, 4, 8))
COMMIT_BLOCKS = choices(block_elements=(2048, 4096, 8192), num_warps=(4, 8))
CASES = [
    *(KernelCase(f"attention.{kind}", partial(attended, kind), TILES) for kind in KINDS),
    KernelCase("attention.step", partial(attended, "full", step=True), STEP_TILES),
    KernelCase("attention_canvas", partial(attended, "full", canvas=True), CANVAS_TILES),
    *(KernelCase(f"rope.{kind}", partial(rope, kind), ROPE_BLOCKS) for kind in KINDS),
    *(KernelCase(f"kv_write.{kind}", partial(kv_write, kind), COMMIT_BLOCKS) for kind in KINDS),
]
