"""Routed experts: y[t] = sum over slots k of w[t, k] * down_e(gelu(gate_e(x[t])) * up_e(x[t])), e = experts[t, k].

The sum runs over a token's slots in their routed order, never in order of arrival, so it is the same from run to run.
Packed experts are dequantised one at a time: the BF16 experts of a layer never exist together.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from redraft.kernels.mlp import gated
from redraft.quant.packing import dequantize
from redraft.weights import DenseExperts, PackedExperts


def run_experts(
    x: torch.Tensor, experts: DenseExperts | PackedExperts, weights: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """x [T, H], routing weights fp32 [T, k], expert ids int64 [T, k] -> [T, H] in x's dtype."""
    tokens, top_k = index.shape
    order = index.flatten().argsort(stable=True)
    counts = torch.bincount(index.flatten(), minlength=_num_experts(experts)).tolist()
    slots = x.new_empty(tokens * top_k, x.shape[-1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = order[start : start + count]
            slots[rows] = _expert(x[rows // top_k], experts, expert)
            start += count
    weighted = slots * weights.flatten()[:, None]
    return weighted.view(tokens, top_k, -1).sum(dim=1).to(x.dtype)


def _num_experts(experts: DenseExperts | PackedExperts) -> int:
    return experts.down.shape[0] if isinstance(experts, DenseExperts) else experts.dn_q.shape[0]


def _expert(x: torch.Tensor, experts: DenseExperts | PackedExperts, e: int) -> torch.Tensor:
    if isinstance(experts, DenseExperts):
        gate_up, down = experts.gate_up[e], experts.down[e]
    else:
        gate_up = dequantize(experts.gu_q[e], experts.gu_s[e], experts.gu_z[e], x.dtype)
        down = dequantize(experts.dn_q[e], experts.dn_s[e], experts.dn_z[e], x.dtype)
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(gated(gate, up), down)
