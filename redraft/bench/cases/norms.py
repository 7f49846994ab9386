"""kernels/norms.py and self_conditioning.py: every launch that norms rows, and the way of the signal to the slots."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from redraft.bench.cases.case import Changes, KernelCase, Problem, Scale
from redraft.bench.cases.inputs import by_formula, choices, first_pass, gaussian, lanes, routing, weight
from redraft.bench.roofline import Work
from redraft.kernels import norms
from redraft.kernels.self_conditioning import scatter_signal, scatter_signal_reference, soft_norm
from redraft.kernels.slots import assign_slots_reference


def rms_norm(scale: Scale, generator: torch.Generator, changes: Changes) -> Problem:
    h, eps = scale.config.hidden_size, scale.config.rms_norm_eps
    x, w = gaussian(scale, generator, scale.rows, h), weight(scale, generator, h)
    out = torch.empty_like(x)
    run = partial(norms.rms_norm_into, x, w, eps, out, settings=replace(norms.ROW, **changes))
    work = Work(2 * x.nbytes + w.nbytes, 4 * x.numel())
    return by_formula(run, {"out": out}, partial(norms.rms_norm, eps=eps), (x, w), work)


def embed(scale: Scale, generator: torch.Generator, changes: Changes) -> Problem:
    h, eps, vocab = scale.config.hidden_size, scale.config.rms_norm_eps, scale.config.vocab_size
    # As many rows as a pass can touch twice over: a whole table is not needed to time a gather of 256 rows.
    table = gaussian(scale, generator, min(vocab, 64 * scale.rows), h, std=h**-0.5)
    tokens = torch.randint(table.shape[0], (scale.rows,), generator=generator, device=scale.device)
    signal, w = gaussian(scale, generator, scale.rows, h), weight(scale, generator, h)
    step = first_pass(scale).step + 1  # a first pass would not read the signal
    more: dict[str, Any] = {"normed": True, "slots": lanes(scale), "step": step}
    outputs: dict[str, Any] = {name: torch.empty_like(signal) for name in ("x", "next_in")}
    factor, settings = float(h**0.5), replace(norms.ROW, **changes)

    def formula(table: torch.Tensor, signal: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return norms.embed_norms_reference(tokens, table, factor, eps, w, signal=signal, **more)

    run = partial(norms.embed_norms, tokens, table, factor, eps, w, signal=signal, **more, **outputs, settings=settings)
    work = Work(4 * signal.nbytes + tokens.nbytes, 10 * signal.numel())
    return by_formula(run, outputs, formula, (table, signal, w), work)


def residual(scale: Scale, generator: torch.Generator, changes: Changes) -> Problem:
    h, eps, group, rows = scale.config.hidden_size, scale.config.rms_norm_eps, scale.spec.group_gate_up, scale.rows
    start, delta = gaussian(scale, generator, rows, h), gaussian(scale, generator, rows, h)
    after, of_dense, of_experts, of_router = (weight(scale, generator, h) for _ in range(4))
    given = (delta, after, of_dense, of_experts, of_router)
    x, out = start.clone(), {name: torch.empty_like(start) for name in ("dense_in", "expert_in", "router_in")}
    out["group_sums"] = torch.empty(rows, h // group, device=scale.device)
    settings = replace(norms.ROW, **changes)
    run = partial(norms.residual_norms, x, *given, eps, **out, group_size=group, settings=settings)
    formula = partial(norms.residual_norms_reference, eps=eps, group_size=group)
    work = Work(6 * x.nbytes + out["group_sums"].nbytes, 20 * x.numel())
    return by_formula(run, {"x": x, **out}, formula, (start, *given), work, starts={"x": start})


def combine(scale: Scale, generator: torch.Generator, changes: Changes) -> Problem:
    config, rows, h, eps = scale.config, scale.rows, scale.config.hidden_size, scale.config.rms_norm_eps
    share, experts = routing(scale, generator)
    slot_of = assign_slots_reference(experts.long(), config.num_experts, 32).slot_of
    expert_rows = gaussian(scale, generator, rows * config.top_k_experts, h)
    start, dense = gaussian(scale, generator, rows, h), gaussian(scale, generator, rows, h)
    scalar = torch.full((1,), 0.9, device=scale.device, dtype=scale.dtype)
    of_dense, of_routed, of_both, of_next = (weight(scale, generator, h) for _ in range(4))
    given = (dense, expert_rows, slot_of, share, of_dense, of_routed, of_both, scalar, of_next)
    x, next_in = start.clone(), torch.empty_like(start)
    run = partial(norms.combine_norms, x, *given, eps, next_in=next_in, settings=replace(norms.ROW, **changes))
    formula = partial(norms.combine_norms_reference, eps=eps)
    work = Work(expert_rows.nbytes + 4 * x.nbytes + slot_of.nbytes + share.nbytes, 30 * x.numel())
    return by_formula(run, {"x": x, "next_in": next_in}, formula, (start, *given), work, starts={"x": start})


def soft(scale: Scale, generator: torch.Generator, changes: Changes) -> Problem:
    """The norm between self-conditioning's two products, in place."""
    h, eps, factor = scale.config.hidden_size, scale.config.rms_norm_eps, float(scale.config.hidden_size**0.5)
    start, w = gaussian(scale, generator, scale.rows, h, std=h**-0.5), weight(scale, generator, h)
    soft = start.clone()

    def formula(soft: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return norms.rms_norm(soft * factor, w, eps)

    run, work = partial(soft_norm, soft, w, factor, eps), Work(2 * soft.nbytes + w.nbytes, 5 * soft.numel())
    return by_formula(run, {"soft": soft}, formula, (start, w), work, starts={"soft": start})


def scatter(scale: Scale, generator: torch.Generator, changes: Changes) -> Problem:
    rows = gaussian(scale, generator, scale.rows, scale.config.hidden_size)
    signal = torch.zeros_like(rows)
    given = (rows, first_pass(scale).done, lanes(scale), signal)
    return Problem(
        run=partial(scatter_signal, *given, replace(norms.ROW, **changes)),
        outputs={"signal": signal},
        reference=lambda: {"signal": scatter_signal_reference(*given)},
        work=Work(2 * rows.nbytes, 0),
        tolerance=0.0,  # a copy
    )


ROWS = choices(elements=(8, 32))
CASES = [
    KernelCase("norms.rms_norm", rms_norm, ROWS),
    KernelCase("norms.embed", embed, ROWS),
    KernelCase("norms.residual", residual, ROWS),
    KernelCase("norms.combine", combine, ROWS),
    KernelCase("self_conditioning.norm", soft),
    KernelCase("self_conditioning.scatter", scatter, ROWS),
]
