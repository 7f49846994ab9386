"""The tensors of one network, plain and unwrapped: what `checkpoint.py` returns and `model.py` reads.

Names follow transformers' parameter names. Encoder and decoder share everything here except `encoder_scalar` and
`decoder_scalar`, the two per-layer output scalars that are buffers and never tied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from redraft.config import QuantSpec


@dataclass
class DenseExperts:
    """Routed experts in full precision.

    gate_up [E, 2I, H]: gate rows, then up rows. down [E, H, I].
    """

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass
class PackedExperts:
    """Routed experts in 4 bits, the tensors of `dg-w4a16-v1`: w = (q - z) * s with q in 0..15.

    gu_q uint8 [E, 2I, H/2], gu_s and gu_z fp16 [E, 2I, H/G1]; dn_q uint8 [E, H, I/2], dn_s and dn_z fp16 [E, H, I/G2].
    Byte j of a row holds q[2j] in its low and q[2j+1] in its high nibble. Scales and zero points stay fp16 whatever
    the compute dtype.
    """

    gu_q: torch.Tensor
    gu_s: torch.Tensor
    gu_z: torch.Tensor
    dn_q: torch.Tensor
    dn_s: torch.Tensor
    dn_z: torch.Tensor


@dataclass
class RepackedExperts:
    """Packed experts in the layout of the GPU kernels (`kernels/experts.py`), with as many bytes as PackedExperts.

    uint8 [E, row tiles * groups, bytes of a block]: a block holds one group of a tile's rows, as words of four nibbles,
    int16 [tile rows, group / 4], then int32 [tile rows]: the fp16 scale in the low half, the fp16 zero point in the
    high half.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    spec: QuantSpec


@dataclass
class LayerWeights:
    """One transformer layer. H hidden, D head dim, I dense MLP width, E experts."""

    input_layernorm: torch.Tensor  # [H]
    post_attention_layernorm: torch.Tensor  # [H]
    pre_feedforward_layernorm: torch.Tensor  # [H]
    post_feedforward_layernorm: torch.Tensor  # [H]
    post_feedforward_layernorm_1: torch.Tensor  # [H], after the dense MLP
    pre_feedforward_layernorm_2: torch.Tensor  # [H], before the experts
    post_feedforward_layernorm_2: torch.Tensor  # [H], after the experts
    q_proj: torch.Tensor  # [heads * D, H]
    k_proj: torch.Tensor  # [kv_heads * D, H]
    v_proj: torch.Tensor | None  # [kv_heads * D, H]; None on full layers, where V is made from k_proj's output
    o_proj: torch.Tensor  # [H, heads * D]
    q_norm: torch.Tensor  # [D]
    k_norm: torch.Tensor  # [D]
    gate_proj: torch.Tensor  # [I, H]
    up_proj: torch.Tensor  # [I, H]
    down_proj: torch.Tensor  # [H, I]
    router_proj: torch.Tensor  # [E, H]
    router_scale: torch.Tensor  # [H]
    per_expert_scale: torch.Tensor  # [E]
    experts: DenseExperts | PackedExperts | RepackedExperts
    encoder_scalar: torch.Tensor  # [1]
    decoder_scalar: torch.Tensor  # [1]


@dataclass
class SelfConditioningWeights:
    """The decoder-only gated MLP that turns the previous pass's soft embeddings into an input signal."""

    pre_norm: torch.Tensor  # [H]
    gate_proj: torch.Tensor  # [I, H]
    up_proj: torch.Tensor  # [I, H]
    down_proj: torch.Tensor  # [H, I]


@dataclass
class Weights:
    """The whole text network. `embed` [V, H] is also the head."""

    embed: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor  # [H]
    self_conditioning: SelfConditioningWeights


def iter_tensors(node: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (dotted name, tensor) for every tensor below a weights dataclass, in declaration order."""
    if isinstance(node, torch.Tensor):
        yield prefix, node
    elif isinstance(node, list):
        for i, item in enumerate(node):
            yield from iter_tensors(item, f"{prefix}.{i}")
    elif is_dataclass(node):
        for f in fields(node):
            yield from iter_tensors(getattr(node, f.name), f"{prefix}.{f.name}" if prefix else f.name)


def nbytes(node: Any) -> int:
    """Bytes of every tensor below `node`."""
    return sum(t.numel() * t.element_size() for _, t in iter_tensors(node))
