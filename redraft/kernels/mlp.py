"""Gated MLP with tanh-GELU: down(gelu(gate(x)) * up(x))."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """tanh-GELU(gate) * up, elementwise."""
    return F.gelu(gate, approximate="tanh") * up


def gated_mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """x [..., H], gate and up [I, H], down [H, I] -> [..., H]."""
    return F.linear(gated(F.linear(x, gate), F.linear(x, up)), down)
