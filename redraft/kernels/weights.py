"""Weights that are several tensors, as kernels and their references take them."""

from dataclasses import dataclass

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
class SelfConditioningWeights:
    """The decoder-only gated MLP that turns the previous pass's soft embeddings into an input signal."""

    pre_norm: torch.Tensor  # [H]
    gate_proj: torch.Tensor  # [I, H]
    up_proj: torch.Tensor  # [I, H]
    down_proj: torch.Tensor  # [H, I]
