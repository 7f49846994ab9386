"""RMSNorm: y = x * (mean(x^2) + eps)^-1/2 [* weight], computed in fp32 and rounded once to x's dtype.

A layer norms one residual seven times. The launches below read it once wherever they can: one program per row holds the
row in registers, adds what comes in, and writes every norm that the next matrix products read.
They round where the plain composition of `rms_norm` calls rounds, so both give the same bits up to fp32 rounding.
No kernel writes weights, so they are loaded while the launch ahead is not over yet; all else that a row reads follows
at once, since no load moves up past the barriers of a sum.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from redraft.kernels.launch import after_previous, early_launch, let_next_start, rounded, tl, triton
from redraft.kernels.tables import LaunchSettings, run


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Normalise the last dimension. x [..., H] any float dtype, weight [H] or None. Returns x's shape and dtype."""
    x32 = x.float()
    normed = x32 * torch.pow(x32.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    if weight is not None:
        normed = normed * weight.float()
    return normed.type_as(x)


def slot_rows(slots: torch.Tensor, length: int) -> torch.Tensor:
    """int64 [W * length]: which rows of state that slots hold, `length` rows each, belong to the lanes of a pass."""
    return (slots.long()[:, None] * length + torch.arange(length, device=slots.device)).flatten()


def embed_norms_reference(
    tokens: torch.Tensor, embed: torch.Tensor, scale: float, eps: float, next_weight: torch.Tensor, *, normed: bool,
    slots: torch.Tensor | None = None, signal: torch.Tensor | None = None, step: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What `embed_norms` writes: x and next_in. With slots it needs step, which says how many there are."""
    if slots is not None and step is not None:
        length = tokens.shape[0] // step.shape[0]
        here, later = slot_rows(slots, length), (step[slots] > 0).repeat_interleave(length)
        tokens = tokens[here]
        signal = None if signal is None else torch.where(later[:, None], signal[here], 0.0).to(signal.dtype)
    x = F.embedding(tokens, embed) * scale
    if signal is not None:
        x = x + signal
    if normed:
        x = rms_norm(x, None, eps)
    return x, rms_norm(x, next_weight, eps)


def residual_norms_reference(
    x: torch.Tensor, delta: torch.Tensor, delta_weight: torch.Tensor, dense_weight: torch.Tensor,
    expert_weight: torch.Tensor, router_weight: torch.Tensor, eps: float, group_size: int = 128,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """What `residual_norms` writes: x, dense_in, expert_in, router_in, group_sums."""
    x = x + rms_norm(delta, delta_weight, eps)
    expert_in = rms_norm(x, expert_weight, eps)
    router_in = rms_norm(x, None, eps) * router_weight * x.shape[-1] ** -0.5
    group_sums = expert_in.float().unflatten(-1, (-1, group_size)).sum(-1)
    return x, rms_norm(x, dense_weight, eps), expert_in, router_in, group_sums


def combine_norms_reference(
    x: torch.Tensor, dense: torch.Tensor, expert_rows: torch.Tensor, slot_of: torch.Tensor, routing: torch.Tensor,
    dense_weight: torch.Tensor, expert_weight: torch.Tensor, weight: torch.Tensor, scalar: torch.Tensor,
    next_weight: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What `combine_norms` writes: x and next_in."""
    weighted = expert_rows[slot_of.long().view_as(routing)] * routing[..., None]
    routed = weighted.sum(dim=1).to(x.dtype)
    both = rms_norm(dense, dense_weight, eps) + rms_norm(routed, expert_weight, eps)
    x = (x + rms_norm(both, weight, eps)) * scalar
    return x, rms_norm(x, next_weight, eps)


@dataclass(frozen=True)
class RowSettings(LaunchSettings):
    """A program holds a whole row, a thread at least `elements` of it: with 16, two 16-byte loads of BF16."""

    elements: int = 16

    def options(self, hidden: int) -> dict[str, int]:
        """Launch options for rows of `hidden`."""
        block = triton.next_power_of_2(hidden)
        return {"BLOCK_H": block, "num_warps": min(16, max(1, block // (32 * self.elements)))}


ROW = RowSettings()


@triton.jit
def _normalized(x, eps, H: tl.constexpr):
    """x * (mean(x^2) + eps)^-1/2 of one fp32 row whose lanes past H are zero."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / H + eps)


@triton.jit
def _row(ptr, row, cols, H: tl.constexpr):
    return tl.load(ptr + row * H + cols, mask=cols < H, other=0.0).to(tl.float32)


@triton.jit
def load_weight(ptr, cols, H: tl.constexpr):
    """A norm's weights, as stored: they are widened where they are used, after `after_previous`."""
    return tl.load(ptr + cols, mask=cols < H, other=0.0)


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, stride_xm, scale, eps,
    H: tl.constexpr, BLOCK_H: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_H)
    let_next_start(EARLY)
    if weight_ptr is not None:
        weight = load_weight(weight_ptr, cols, H)
    after_previous(EARLY)
    x = tl.load(x_ptr + row * stride_xm + cols, mask=cols < H, other=0.0).to(tl.float32)
    if scale is not None:
        x = rounded(x * scale, out_ptr.dtype.element_ty)
    y = _normalized(x, eps, H)
    if weight_ptr is not None:
        y *= weight.to(tl.float32)
    tl.store(out_ptr + row * H + cols, rounded(y, out_ptr.dtype.element_ty), mask=cols < H)


def rms_norm_into(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, out: torch.Tensor, scale: float | None = None,
    settings: RowSettings | None = None,
) -> None:  # fmt: skip
    """out = rms_norm(x, weight, eps), or of x * scale, rounded. x [R, H] with contiguous rows, out [R, H] contiguous,
    another tensor or x.
    """
    rows, hidden = x.shape
    run("norms.rms_norm", settings, ROW, lambda s: _rms_norm_kernel[(rows,)](
        x, weight, out, x.stride(0), scale, eps, H=hidden, **s.options(hidden), **early_launch()
    ))  # fmt: skip


@triton.jit
def _embed_norms_kernel(
    tokens_ptr, embed_ptr, slots_ptr, signal_ptr, step_ptr, next_weight_ptr, x_ptr, next_in_ptr,
    rows_per_lane, scale, eps, H: tl.constexpr, NORMED: tl.constexpr, BLOCK_H: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_H)
    dtype = x_ptr.dtype.element_ty
    let_next_start(EARLY)
    next_weight = load_weight(next_weight_ptr, cols, H)
    after_previous(EARLY)
    source = row
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + row // rows_per_lane).to(tl.int64)
        source = slot * rows_per_lane + row % rows_per_lane
    token = tl.load(tokens_ptr + source).to(tl.int64)
    x = rounded(_row(embed_ptr, token, cols, H) * scale, dtype)
    if signal_ptr is not None:
        # Not loaded at all on a first pass: NaN * 0 would stay NaN.
        keep = (cols < H) & (tl.load(step_ptr + slot) > 0)
        x = rounded(x + tl.load(signal_ptr + source * H + cols, mask=keep, other=0.0).to(tl.float32), dtype)
    if NORMED:
        x = rounded(_normalized(x, eps, H), dtype)
    next_in = rounded(_normalized(x, eps, H) * next_weight.to(tl.float32), dtype)
    tl.store(x_ptr + row * H + cols, x, mask=cols < H)
    tl.store(next_in_ptr + row * H + cols, next_in, mask=cols < H)


def embed_norms(
    tokens: torch.Tensor, embed: torch.Tensor, scale: float, eps: float, next_weight: torch.Tensor, *, normed: bool,
    x: torch.Tensor, next_in: torch.Tensor, slots: torch.Tensor | None = None, signal: torch.Tensor | None = None,
    step: torch.Tensor | None = None, settings: RowSettings | None = None,
) -> None:  # fmt: skip
    """x = embed[tokens] * scale [+ signal], normed when `normed`; next_in = rms_norm(x) * next_weight.

    embed [V, H]; x, next_in [R, H]. An encode pass: tokens int64 [R], by lane, no norm. A denoise pass norms x and
    reads what slots hold, C rows each: with slots int32 [W] and R = W * C, row p of lane i is row p of slot slots[i] of
    tokens int64 [S * C] and of signal [S * C, H], which may be left out. The signal, self-conditioning's, is that of
    the pass before: where step int32 [S] is 0 there is none. `scale` is sqrt(H) as rounded to the model's dtype.
    """
    rows, hidden = x.shape
    assert signal is None or (slots is not None and step is not None), "signals belong to slots, from their second pass"
    per_lane = 1 if slots is None else rows // slots.shape[0]
    run("norms.embed", settings, ROW, lambda s: _embed_norms_kernel[(rows,)](
        tokens, embed, slots, signal, step, next_weight, x, next_in, per_lane, scale, eps,
        H=hidden, NORMED=normed, **s.options(hidden), **early_launch(),
    ))  # fmt: skip


@triton.jit
def _residual_norms_kernel(
    x_ptr, delta_ptr, delta_weight_ptr, dense_weight_ptr, expert_weight_ptr, router_weight_ptr,
    dense_in_ptr, expert_in_ptr, router_in_ptr, group_sums_ptr, router_scale, eps,
    H: tl.constexpr, GROUP: tl.constexpr, BLOCK_H: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_H)
    keep = cols < H
    here = row * H + cols
    dtype = x_ptr.dtype.element_ty
    let_next_start(EARLY)
    delta_weight, dense_weight = load_weight(delta_weight_ptr, cols, H), load_weight(dense_weight_ptr, cols, H)
    expert_weight, router_weight = load_weight(expert_weight_ptr, cols, H), load_weight(router_weight_ptr, cols, H)
    after_previous(EARLY)
    delta, x = _row(delta_ptr, row, cols, H), _row(x_ptr, row, cols, H)
    delta = _normalized(delta, eps, H) * delta_weight.to(tl.float32)
    x = rounded(x + rounded(delta, dtype), dtype)
    normed = _normalized(x, eps, H)
    dense_in = rounded(normed * dense_weight.to(tl.float32), dtype)
    expert_in = rounded(normed * expert_weight.to(tl.float32), dtype)
    router_in = rounded(rounded(normed, dtype) * router_weight.to(tl.float32), dtype)
    tl.store(x_ptr + here, x, mask=keep)
    tl.store(dense_in_ptr + here, dense_in, mask=keep)
    tl.store(expert_in_ptr + here, expert_in, mask=keep)
    tl.store(router_in_ptr + here, rounded(router_in * router_scale, dtype), mask=keep)
    groups = tl.arange(0, BLOCK_H // GROUP)
    sums = tl.sum(tl.reshape(expert_in, (BLOCK_H // GROUP, GROUP)), axis=1)
    tl.store(group_sums_ptr + row * (H // GROUP) + groups, sums, mask=groups < H // GROUP)


def residual_norms(
    x: torch.Tensor, delta: torch.Tensor, delta_weight: torch.Tensor, dense_weight: torch.Tensor,
    expert_weight: torch.Tensor, router_weight: torch.Tensor, eps: float, *, dense_in: torch.Tensor,
    expert_in: torch.Tensor, router_in: torch.Tensor, group_sums: torch.Tensor, group_size: int = 128,
    settings: RowSettings | None = None,
) -> None:  # fmt: skip
    """x += rms_norm(delta) * delta_weight in place, then the three norms of it that the feed-forward reads.

    dense_in and expert_in = rms_norm(x) * their weight; router_in = rms_norm(x) * router_weight * H^-1/2, rounded after
    each factor as the router's reference does; group_sums fp32 [R, H / group_size] = sums of the rounded expert_in,
    which the 4-bit experts need for their zero points. Everything else [R, H]; group_size a power of two dividing H.
    """
    rows, hidden = x.shape
    assert hidden % group_size == 0 and group_size & (group_size - 1) == 0, "groups must tile a row"
    run("norms.residual", settings, ROW, lambda s: _residual_norms_kernel[(rows,)](
        x, delta, delta_weight, dense_weight, expert_weight, router_weight,
        dense_in, expert_in, router_in, group_sums, hidden**-0.5, eps,
        H=hidden, GROUP=group_size, **s.options(hidden), **early_launch(),
    ))  # fmt: skip


@triton.jit
def _combine_norms_kernel(
    x_ptr, dense_ptr, expert_rows_ptr, slot_of_ptr, routing_ptr,
    dense_weight_ptr, expert_weight_ptr, weight_ptr, scalar_ptr, next_weight_ptr, next_in_ptr, eps,
    H: tl.constexpr, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_H)
    keep = cols < H
    dtype = x_ptr.dtype.element_ty
    let_next_start(EARLY)
    dense_weight, expert_weight = load_weight(dense_weight_ptr, cols, H), load_weight(expert_weight_ptr, cols, H)
    weight, scalar = load_weight(weight_ptr, cols, H), tl.load(scalar_ptr)
    next_weight = load_weight(next_weight_ptr, cols, H)
    after_previous(EARLY)
    routed = tl.zeros((BLOCK_H,), tl.float32)
    for k in tl.static_range(TOP_K):
        slot = tl.load(slot_of_ptr + row * TOP_K + k).to(tl.int64)
        routed += tl.load(routing_ptr + row * TOP_K + k) * _row(expert_rows_ptr, slot, cols, H)
    dense, x = _row(dense_ptr, row, cols, H), _row(x_ptr, row, cols, H)
    routed = _normalized(rounded(routed, dtype), eps, H) * expert_weight.to(tl.float32)
    dense = _normalized(dense, eps, H) * dense_weight.to(tl.float32)
    both = rounded(rounded(dense, dtype) + rounded(routed, dtype), dtype)
    delta = rounded(_normalized(both, eps, H) * weight.to(tl.float32), dtype)
    x = rounded(x + delta, dtype)
    x = rounded(x * scalar.to(tl.float32), dtype)
    next_in = rounded(_normalized(x, eps, H) * next_weight.to(tl.float32), dtype)
    tl.store(x_ptr + row * H + cols, x, mask=keep)
    tl.store(next_in_ptr + row * H + cols, next_in, mask=keep)


def combine_norms(
    x: torch.Tensor, dense: torch.Tensor, expert_rows: torch.Tensor, slot_of: torch.Tensor, routing: torch.Tensor,
    dense_weight: torch.Tensor, expert_weight: torch.Tensor, weight: torch.Tensor, scalar: torch.Tensor,
    next_weight: torch.Tensor, eps: float, *, next_in: torch.Tensor, settings: RowSettings | None = None,
) -> None:  # fmt: skip
    """The end of a layer: both feed-forwards join the residual, and the next layer's input is normed.

    routed = sum over k, in order, of routing[r, k] * expert_rows[slot_of[r, k]];
    x = (x + rms_norm(rms_norm(dense) * dense_weight + rms_norm(routed) * expert_weight) * weight) * scalar in place;
    next_in = rms_norm(x) * next_weight (the next layer's input norm, or the final norm).
    x, dense, next_in [R, H]; expert_rows [R * k, H]; slot_of int32 [R * k]; routing fp32 [R, k]; scalar one element.
    """
    rows, hidden = x.shape
    run("norms.combine", settings, ROW, lambda s: _combine_norms_kernel[(rows,)](
        x, dense, expert_rows, slot_of, routing, dense_weight, expert_weight, weight, scalar, next_weight, next_in,
        eps, H=hidden, TOP_K=routing.shape[1], **s.options(hidden), **early_launch(),
    ))  # fmt: skip
