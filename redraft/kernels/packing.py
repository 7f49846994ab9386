"""Two 4-bit numbers a byte: byte j of a row holds element 2j in its low nibble and element 2j + 1 in its high one."""

import torch


def pack_nibbles(q: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K] of values 0..15, K even -> uint8 [..., K/2]."""
    if q.shape[-1] % 2:
        raise ValueError(f"cannot pack an odd number of elements, found {q.shape[-1]}")
    return q[..., 0::2] | (q[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K/2] -> uint8 [..., K] of values 0..15."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def dequantize(
    packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """w = (q - z) * s, computed in fp32 and then cast to `dtype`.

    packed uint8 [..., K/2], scale and zero [..., K/G] -> [..., K]; group g covers elements g*G to (g+1)*G - 1.
    """
    q = unpack_nibbles(packed).unflatten(-1, (scale.shape[-1], -1)).float()
    return ((q - zero.float().unsqueeze(-1)) * scale.float().unsqueeze(-1)).flatten(-2).to(dtype)
