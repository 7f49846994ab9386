"""Gated MLP with tanh-GELU: down(gelu(gate(x)) * up(x)).

gelu(g) = g/2 * (1 + tanh(u)) = g / (1 + exp(-2u)), u = sqrt(2/pi) * (g + 0.044715 g^3): the second form needs no tanh
and loses no digits where tanh nears -1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from redraft.kernels.launch import after_previous, early_launch, rounded, tl, triton


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """tanh-GELU(gate) * up, elementwise."""
    return F.gelu(gate, approximate="tanh") * up


def gated_mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """x [..., H], gate and up [I, H], down [H, I] -> [..., H]."""
    return F.linear(gated(F.linear(x, gate), F.linear(x, up)), down)


@triton.jit
def gelu_tanh(x):
    """tanh-GELU of fp32 values."""
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * u))


@triton.jit
def _gated_kernel(gate_up_ptr, out_ptr, I: tl.constexpr, BLOCK_I: tl.constexpr, EARLY: tl.constexpr):  # noqa: E741
    after_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    keep = cols < I
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * 2 * I + cols, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * I + I + cols, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * I + cols, rounded(rounded(gelu_tanh(gate), dtype) * up, dtype), mask=keep)


def gated_into(gate_up: torch.Tensor, out: torch.Tensor, *, block: int = 1024) -> None:
    """out [R, I] = tanh-GELU(gate) * up of gate_up [R, 2I] = [gate | up], both contiguous, any float dtype.

    block: columns a program; 1,024 gives 4 warps one 16-byte load of each half a thread, and 3 programs a row of 2,112.
    """
    rows, intermediate = out.shape
    grid = (rows, triton.cdiv(intermediate, block))
    _gated_kernel[grid](gate_up, out, I=intermediate, BLOCK_I=block, num_warps=4, **early_launch())
