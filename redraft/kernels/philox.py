"""Philox 4x32-10, the counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

Pure function of (key, counter): any position of any pass can be drawn alone, on any device, in any order.
"""

import torch

from redraft.kernels.launch import tl, triton

_MASK = 0xFFFFFFFF
_ROUND = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox(seed: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor) -> torch.Tensor:
    """Four 32-bit words per counter.

    seed int64 (its low and high halves are the key), c0..c3 int64 holding 32-bit counters; all broadcast together.
    Returns int64 [..., 4], each word in 0..2^32 - 1.
    """
    words = torch.broadcast_tensors(c0, c1, c2, c3)
    a, b, c, d = (w & _MASK for w in words)
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(ROUNDS):
        high0, low0 = _mul(a, _ROUND[0])
        high1, low1 = _mul(c, _ROUND[1])
        a, b, c, d = high1 ^ b ^ key0, low1, high0 ^ d ^ key1, low0
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return torch.stack((a, b, c, d), dim=-1)


def _mul(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of x * factor; the halves keep every product inside a signed 64-bit integer."""
    low_part = (x & 0xFFFF) * factor
    high_part = (x >> 16) * factor + (low_part >> 16)
    return high_part >> 16, ((high_part & 0xFFFF) << 16) | (low_part & 0xFFFF)


@triton.jit
def philox_words(seed, c0, c1, c2, c3):
    """`philox` inside a Triton kernel: four uint32 words for 32-bit counters that broadcast together, seed int64.

    One wide multiplication gives both halves of a product; tl.philox spends two instructions on them.
    """
    key0, key1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    a, b, c, d = c0.to(tl.uint32), c1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32)
    for _ in tl.static_range(10):
        left = a.to(tl.uint64) * 0xD2511F53
        right = c.to(tl.uint64) * 0xCD9E8D57
        a = (right >> 32).to(tl.uint32) ^ b ^ key0
        c = (left >> 32).to(tl.uint32) ^ d ^ key1
        b, d = right.to(tl.uint32), left.to(tl.uint32)
        key0 = tl.add(key0, 0x9E3779B9, sanitize_overflow=False)
        key1 = tl.add(key1, 0xBB67AE85, sanitize_overflow=False)
    return a, b, c, d
