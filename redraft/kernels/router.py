"""Router: which experts each token visits, and with what weight.

p = softmax_fp32(W (rmsnorm(x) * scale * H^-1/2)); the k largest p, renormalised to sum 1, times per_expert_scale.
It reads the raw residual, not the experts' normed input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from redraft.kernels.norms import rms_norm


def route(
    x: torch.Tensor, proj: torch.Tensor, scale: torch.Tensor, per_expert_scale: torch.Tensor, top_k: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H], proj [E, H], scale [H], per_expert_scale [E] -> weights fp32 [T, k], expert ids int64 [T, k]."""
    normed = rms_norm(x, None, eps) * scale * x.shape[-1] ** -0.5
    probabilities = F.softmax(F.linear(normed, proj), dim=-1, dtype=torch.float32)
    weights, experts = torch.topk(probabilities, top_k, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * per_expert_scale[experts], experts
