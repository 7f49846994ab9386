"""Self-conditioning: the previous pass's prediction as an input signal, without an fp32 probability matrix.

    soft = probs @ E * sqrt(H)              probs [R, V] BF16 from sampling.probabilities, E [V, H] the embedding
    signal = mlp(pre_norm(soft))            zero on a canvas's first pass, decided on the device

`embed_norms` adds the signal to the embedded canvas and norms the sum (model.py, `Model._self_condition`). The product
with E runs in the matrix library, 378 GFLOP for 256 rows; what is Triton here is the scale, the zero and the pre-norm.
A gated MLP of zeros is zero, so a first pass needs no other mask; the product still runs, on whatever probs holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from redraft.kernels.launch import after_previous, early_launch, let_next_start, rounded, tl, triton
from redraft.kernels.mlp import gated_into, gated_mlp
from redraft.kernels.norms import load_weight, rms_norm, row_launch
from redraft.kernels.state import SlotState
from redraft.network.weights import SelfConditioningWeights


def self_condition_reference(
    probs: torch.Tensor, embed: torch.Tensor, weights: SelfConditioningWeights, first: torch.Tensor, eps: float
) -> torch.Tensor:
    """What `self_condition` writes: the signal [R, H] for probs [R, V] and first bool [R]."""
    scale = torch.tensor(embed.shape[1] ** 0.5, dtype=embed.dtype, device=embed.device)
    soft = torch.matmul(probs, embed) * scale
    normed = rms_norm(torch.where(first[:, None], 0.0, soft).to(embed.dtype), weights.pre_norm, eps)
    return gated_mlp(normed, weights.gate_proj, weights.up_proj, weights.down_proj)


@dataclass
class SelfConditioningBuffers:
    """Scratch of `self_condition` and its result."""

    soft: torch.Tensor  # [R, H]; pre-normed in place
    gate_up: torch.Tensor  # [R, 2I]
    inner: torch.Tensor  # [R, I]
    signal: torch.Tensor  # [R, H], the output

    @classmethod
    def allocate(
        cls, rows: int, hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device | str
    ) -> SelfConditioningBuffers:
        sizes = (hidden, 2 * intermediate, intermediate, hidden)
        return cls(*(torch.empty(rows, size, dtype=dtype, device=device) for size in sizes))


def self_condition(
    probs: torch.Tensor,
    embed: torch.Tensor,
    weights: SelfConditioningWeights,
    gate_up: torch.Tensor,
    slots: SlotState,
    rows_per_slot: int,
    scale: float,
    eps: float,
    buffers: SelfConditioningBuffers,
) -> None:
    """buffers.signal [R, H] from probs [R, V] of the previous pass; zeros for slots whose step is 0.

    gate_up [2I, H] is gate_proj above up_proj. scale is sqrt(H) rounded to the weights' dtype.
    """
    torch.mm(probs, embed, out=buffers.soft)
    soft_norm(buffers.soft, weights.pre_norm, slots, rows_per_slot, scale, eps)
    torch.mm(buffers.soft, gate_up.t(), out=buffers.gate_up)
    gated_into(buffers.gate_up, buffers.inner)
    torch.mm(buffers.inner, weights.down_proj.t(), out=buffers.signal)


def soft_norm(
    soft: torch.Tensor, weight: torch.Tensor, slots: SlotState, rows_per_slot: int, scale: float, eps: float
) -> None:
    """soft [R, H] = rms_norm(soft * scale, weight) in place; zeros, whatever soft holds, for slots whose step is 0."""
    rows, hidden = soft.shape
    _soft_norm_kernel[(rows,)](
        soft, weight, slots.step, rows_per_slot, scale, eps, H=hidden, **row_launch(hidden), **early_launch()
    )


@triton.jit
def _soft_norm_kernel(
    soft_ptr,
    weight_ptr,
    step_ptr,
    rows_per_slot,
    scale,
    eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_H)
    at, inside = soft_ptr + row.to(tl.int64) * H + cols, cols < H
    dtype = soft_ptr.dtype.element_ty
    weight = load_weight(weight_ptr, cols, H)
    after_previous(EARLY)
    later = tl.load(step_ptr + row // rows_per_slot) > 0
    # Not loaded at all on a first pass: NaN * 0 would stay NaN.
    soft = rounded(tl.load(at, mask=inside & later, other=0.0).to(tl.float32) * scale, dtype)
    normed = soft * tl.rsqrt(tl.sum(soft * soft, 0) / H + eps) * weight.to(tl.float32)
    tl.store(at, rounded(normed, dtype), mask=inside)
