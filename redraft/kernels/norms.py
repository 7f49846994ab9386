"""RMSNorm: y = x * (mean(x^2) + eps)^-1/2 [* weight], computed in fp32 and rounded once to x's dtype."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Normalise the last dimension. x [..., H] any float dtype, weight [H] or None. Returns x's shape and dtype."""
    x32 = x.float()
    normed = x32 * torch.pow(x32.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    if weight is not None:
        normed = normed * weight.float()
    return normed.type_as(x)
