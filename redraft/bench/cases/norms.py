"""kernels/norms.py: every launch of a layer that norms the residual stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from redraft.bench.cases.inputs import BF16_TOLERANCE, ROWS, first_pass, gaussian, lanes, routing, weight
from redraft.bench.kernels import KernelCase, Problem, Scale
from redraft.bench.roofline import Work
from redraft.kernels import norms
from redraft.kernels.slots import assign_slots_reference


def _settings(changes: Mapping[str, Any]) -> norms.RowSettings:
    return dataclasses.replace(norms.ROW, **changes)


def rms_norm(scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    h, eps = scale.config.hidden_size, scale.config.rms_norm_eps
    x, w = gaussian(scale, generator, scale.rows, h), weight(scale, generator, h)
    out = torch.empty_like(x)
    return Problem(
        run=lambda: norms.rms_norm_into(x, w, eps, out, settings=_settings(changes)),
        outputs={"out": out},
        reference=lambda: {"out": norms.rms_norm(x.float(), w.float(), eps)},
        work=Work(2 * x.nbytes + w.nbytes, 4 * x.numel()),
        tolerance=BF16_TOLERANCE,
        stock=lambda: norms.rms_norm(x, w, eps),
        compiles=True,
    )


def embed(scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    h, eps, vocab = scale.config.hidden_size, scale.config.rms_norm_eps, scale.config.vocab_size
    # As many rows as a pass can touch twice over: a whole table is not needed to time a gather of 256 rows.
    table = gaussian(scale, generator, min(vocab, 64 * scale.rows), h, std=h**-0.5)
    tokens = torch.randint(table.shape[0], (scale.rows,), generator=generator, device=scale.device)
    signal, w = gaussian(scale, generator, scale.rows, h), weight(scale, generator, h)
    x, next_in, factor = torch.empty_like(signal), torch.empty_like(signal), float(h**0.5)
    step, slots = first_pass(scale).step + 1, lanes(scale)  # a first pass would not read the signal

    def plain(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        a, b, c = (t.to(dtype) for t in (table, w, signal))
        return norms.embed_norms_reference(tokens, a, factor, eps, b, normed=True, slots=slots, signal=c, step=step)

    def reference() -> dict[str, torch.Tensor]:
        return dict(zip(("x", "next_in"), plain(torch.float32), strict=True))

    return Problem(
        run=lambda: norms.embed_norms(
            tokens,
            table,
            factor,
            eps,
            w,
            normed=True,
            x=x,
            next_in=next_in,
            slots=slots,
            signal=signal,
            step=step,
            settings=_settings(changes),
        ),
        outputs={"x": x, "next_in": next_in},
        reference=reference,
        work=Work(4 * x.nbytes + tokens.nbytes, 10 * x.numel()),
        tolerance=BF16_TOLERANCE,
        stock=lambda: plain(scale.dtype),
        compiles=True,
    )


def residual(scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    h, eps, group, rows = scale.config.hidden_size, scale.config.rms_norm_eps, scale.spec.group_gate_up, scale.rows
    start, delta = gaussian(scale, generator, rows, h), gaussian(scale, generator, rows, h)
    after, dense, expert, router = (weight(scale, generator, h) for _ in range(4))
    x = start.clone()
    out = {name: torch.empty_like(x) for name in ("dense_in", "expert_in", "router_in")}
    out["group_sums"] = torch.empty(rows, h // group, device=scale.device)

    def reference() -> dict[str, torch.Tensor]:
        return dict(zip(("x", *out), plain(torch.float32), strict=True))

    def plain(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        a, b, c, d, e, f = (t.to(dtype) for t in (start, delta, after, dense, expert, router))
        return norms.residual_norms_reference(a, b, c, d, e, f, eps, group)

    return Problem(
        run=lambda: norms.residual_norms(
            x, delta, after, dense, expert, router, eps, **out, group_size=group, settings=_settings(changes)
        ),
        outputs={"x": x, **out},
        reference=reference,
        work=Work(6 * x.nbytes + out["group_sums"].nbytes, 20 * x.numel()),
        tolerance=BF16_TOLERANCE,
        stock=lambda: plain(scale.dtype),
        compiles=True,
        inplace=frozenset({"x"}),
        reset=lambda: x.copy_(start),
    )


def combine(scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    config, rows, h, eps = scale.config, scale.rows, scale.config.hidden_size, scale.config.rms_norm_eps
    share, experts = routing(scale, generator)
    slot_of = assign_slots_reference(experts.long(), config.num_experts, 32).slot_of
    expert_rows = gaussian(scale, generator, rows * config.top_k_experts, h)
    start, dense = gaussian(scale, generator, rows, h), gaussian(scale, generator, rows, h)
    scalar = torch.full((1,), 0.9, device=scale.device, dtype=scale.dtype)
    of_dense, of_routed, of_both, of_next = (weight(scale, generator, h) for _ in range(4))
    x, next_in = start.clone(), torch.empty_like(start)

    def plain(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        first, mlp, rows_of, a, b, c, d, by = (
            t.to(dtype) for t in (start, dense, expert_rows, of_dense, of_routed, of_both, of_next, scalar)
        )
        return norms.combine_norms_reference(first, mlp, rows_of, slot_of, share, a, b, c, by, d, eps)

    return Problem(
        run=lambda: norms.combine_norms(
            x,
            dense,
            expert_rows,
            slot_of,
            share,
            of_dense,
            of_routed,
            of_both,
            scalar,
            of_next,
            eps,
            next_in=next_in,
            settings=_settings(changes),
        ),
        outputs={"x": x, "next_in": next_in},
        reference=lambda: dict(zip(("x", "next_in"), plain(torch.float32), strict=True)),
        work=Work(expert_rows.nbytes + 4 * x.nbytes + slot_of.nbytes + share.nbytes, 30 * x.numel()),
        tolerance=BF16_TOLERANCE,
        stock=lambda: plain(scale.dtype),
        compiles=True,
        inplace=frozenset({"x"}),
        reset=lambda: x.copy_(start),
    )


CASES = [
    KernelCase("norms.rms_norm", rms_norm, ROWS),
    KernelCase("norms.embed", embed, ROWS),
    KernelCase("norms.residual", residual, ROWS),
    KernelCase("norms.combine", combine, ROWS),
]
