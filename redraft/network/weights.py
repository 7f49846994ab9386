"""The tensors of one network, plain and unwrapped: what `quant/load.py` returns and `model.py` reads.

Names follow transformers' parameter names. Encoder and decoder share everything here except `encoder_scalar` and
`decoder_scalar`, the two per-layer output scalars that are buffers and never tied.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from redraft.kernels.weights import DenseExperts, PackedExperts, RepackedExperts, SelfConditioningWeights


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
