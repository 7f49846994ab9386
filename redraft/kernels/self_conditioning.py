"""Self-conditioning: a pass's prediction as an input signal of the next, without an fp32 probability matrix.

    soft = probs @ E * sqrt(H)              probs [R, V] BF16 from sampling.probabilities, E [V, H] the embedding
    signal = mlp(pre_norm(soft))

It runs at the end of a pass, by lane, and `scatter_signal` leaves the signal with the slot. `embed_norms` adds it to
the embedded canvas of the slot's next pass, unless that is the first of a canvas, and norms the sum (model.py,
`Model._self_condition`). The product with E runs in the matrix library, 378 GFLOP for 256 rows; what is Triton here is
the scale, the pre-norm and the copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from redraft.kernels.launch import after_previous, early_launch, tl, triton
from redraft.kernels.mlp import gated_into, gated_mlp
from redraft.kernels.norms import ROW, RowSettings, rms_norm, rms_norm_into, slot_rows
from redraft.kernels.products import Products
from redraft.kernels.tables import run
from redraft.kernels.weights import SelfConditioningWeights


def self_condition_reference(
    probs: torch.Tensor, embed: torch.Tensor, weights: SelfConditioningWeights, eps: float
) -> torch.Tensor:
    """What `self_condition` makes of probs [R, V], by lane: the signal [R, H]."""
    scale = torch.tensor(embed.shape[1] ** 0.5, dtype=embed.dtype, device=embed.device)
    normed = rms_norm(torch.matmul(probs, embed) * scale, weights.pre_norm, eps)
    return gated_mlp(normed, weights.gate_proj, weights.up_proj, weights.down_proj)


@dataclass
class SelfConditioningBuffers:
    """Scratch of `self_condition`."""

    soft: torch.Tensor  # [R, H]; pre-normed in place
    gate_up: torch.Tensor  # [R, 2I]
    inner: torch.Tensor  # [R, I]
    signal: torch.Tensor  # [R, H], by lane

    @classmethod
    def allocate(
        cls, rows: int, hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device | str
    ) -> SelfConditioningBuffers:
        sizes = (hidden, 2 * intermediate, intermediate, hidden)
        return cls(*(torch.empty(rows, size, dtype=dtype, device=device) for size in sizes))


def self_condition(
    probs: torch.Tensor, embed: torch.Tensor, weights: SelfConditioningWeights, gate_up: torch.Tensor,
    done: torch.Tensor, slots: torch.Tensor, scale: float, eps: float, buffers: SelfConditioningBuffers,
    signal: torch.Tensor, products: Products,
) -> None:  # fmt: skip
    """signal [S * C, H] of every slot that is not done from probs [R, V] of this pass, R = W * C.

    gate_up [2I, H] is gate_proj above up_proj. scale is sqrt(H) rounded to the weights' dtype. done int32 [S], slots
    int32 [W].
    """
    products(probs, embed, buffers.soft)
    soft_norm(buffers.soft, weights.pre_norm, scale, eps)
    products(buffers.soft, gate_up.t(), buffers.gate_up)
    gated_into(buffers.gate_up, buffers.inner)
    products(buffers.inner, weights.down_proj.t(), buffers.signal)
    scatter_signal(buffers.signal, done, slots, signal)


def soft_norm(soft: torch.Tensor, weight: torch.Tensor, scale: float, eps: float) -> None:
    """soft [R, H] = rms_norm(soft * scale, weight) in place."""
    rms_norm_into(soft, weight, eps, soft, scale)


def scatter_signal_reference(
    rows: torch.Tensor, done: torch.Tensor, slots: torch.Tensor, signal: torch.Tensor
) -> torch.Tensor:
    """`signal` after `scatter_signal`."""
    length = rows.shape[0] // slots.shape[0]
    running = (done[slots] == 0).repeat_interleave(length)
    return signal.index_copy(0, slot_rows(slots, length)[running], rows[running])


def scatter_signal(
    rows: torch.Tensor, done: torch.Tensor, slots: torch.Tensor, signal: torch.Tensor,
    settings: RowSettings | None = None,
) -> None:  # fmt: skip
    """Copy rows [W * C, H] of every lane to the rows of its slot in signal [S * C, H], unless the slot is done."""
    count, hidden = rows.shape
    run("self_conditioning.scatter", settings, ROW, lambda s: _scatter_kernel[(count,)](
        rows, done, slots, signal, count // slots.shape[0], H=hidden, **s.options(hidden), **early_launch()
    ))  # fmt: skip


@triton.jit
def _scatter_kernel(
    rows_ptr, done_ptr, slots_ptr, signal_ptr, rows_per_lane,
    H: tl.constexpr, BLOCK_H: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row // rows_per_lane).to(tl.int64)
    cols = tl.arange(0, BLOCK_H)
    value = tl.load(rows_ptr + row * H + cols, mask=cols < H, other=0.0)
    keep = (cols < H) & (tl.load(done_ptr + slot) == 0)
    tl.store(signal_ptr + (slot * rows_per_lane + row % rows_per_lane) * H + cols, value, mask=keep)
