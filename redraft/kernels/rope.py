"""Rotary position embedding, plain and proportional (a leading share of the pairs rotates, the rest stays still).

Pair (x[i], x[i + D/2]) turns by position * theta^(-2i/D); with partial_rotary_factor f only i < f*D/2 turn.
"""

from __future__ import annotations

import torch

from redraft.config import LayerConfig


def inverse_frequencies(layer: LayerConfig) -> torch.Tensor:
    """fp32 [head_dim / 2], zeros where the pair does not turn."""
    rotated = int(layer.partial_rotary_factor * layer.head_dim // 2)
    exponent = torch.arange(0, 2 * rotated, 2, dtype=torch.int64).float() / layer.head_dim
    still = torch.zeros(layer.head_dim // 2 - rotated)
    return torch.cat((1.0 / (layer.rope_theta**exponent), still))


Table = tuple[torch.Tensor, torch.Tensor]  # cos and sin


def rope_table(inv_freq: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> Table:
    """cos and sin [N, head_dim] in `dtype` for integer positions [N]; angles are computed in fp32."""
    freqs = positions[:, None].float() * inv_freq
    angles = torch.cat((freqs, freqs), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, table: Table) -> torch.Tensor:
    """Turn x [B, N, heads, D] by a table of N positions."""
    cos, sin = (t[None, :, None, :] for t in table)
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
