"""Attention of new rows over stored rows plus themselves: softmax(Q K^T) V, scale 1 (q_norm and k_norm set it)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Grouped-query attention.

    q [B, heads, N, D], k and v [B, kv_heads, S, D], mask bool [1 or B, 1, N, S] (True = visible) or None for all.
    Returns [B, N, heads * D].
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    return out.transpose(1, 2).flatten(2)
