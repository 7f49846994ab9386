"""How the expert kernels want 4-bit weights in memory: as many bytes as they are stored in, in the order of reading.

Weights are cut into row tiles and groups. A block is one group of one tile: a word of 16 bits holds four nibbles of one
weight row, and pieces of 16 bytes change places within 128 bytes, so that 8 rows read together come from different
banks of shared memory. Gate and up rows alternate in blocks of 8, so that both halves of a pair sit in one thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from redraft.config import ModelConfig, QuantSpec
from redraft.kernels.packing import pack_nibbles, unpack_nibbles
from redraft.kernels.weights import PackedExperts, RepackedExperts


@dataclass(frozen=True)
class GemmTile:
    """The tile of one grouped product: weight rows a program, k a step (a group)."""

    rows: int
    k_block: int


READ_TILES = 4  # row tiles that lie together, for the Hopper products
TILE_ROWS = 32  # token rows a tile; with more, two accumulators of 128 x rows run out of registers (docs/log.md)


def gemm_tiles(config: ModelConfig, spec: QuantSpec) -> tuple[GemmTile, GemmTile] | None:
    """Tiles of the gate/up and down products of these shapes, or None where the kernels do not cover them."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    gate_up, down = product_tiles(hidden, spec)
    powers = all(n & (n - 1) == 0 for n in (spec.group_gate_up, spec.group_down, down.rows))
    fits = 2 * inner % gate_up.rows == 0 and hidden % down.rows == 0
    large = spec.group_down >= 32 and spec.group_gate_up >= 32
    return (gate_up, down) if powers and fits and large else None


def product_tiles(hidden: int, spec: QuantSpec) -> tuple[GemmTile, GemmTile]:
    """Tiles of both products, whether or not the kernels cover them. A gate/up tile is one group of down."""
    return GemmTile(2 * spec.group_down, spec.group_gate_up), GemmTile(min(128, hidden), spec.group_down)


def repack(packed: PackedExperts, config: ModelConfig, spec: QuantSpec) -> RepackedExperts:
    """Packed experts in the layout of the kernels, with as many bytes. The shapes must be covered by `gemm_tiles`."""
    assert gemm_tiles(config, spec) is not None, "gemm_tiles covers these shapes"
    return repack_width(packed, config.moe_intermediate_size, spec)


def repack_width(packed: PackedExperts, width: int, spec: QuantSpec) -> RepackedExperts:
    """`repack` for experts of `width` without a whole config."""
    gate_up, down = product_tiles(packed.dn_q.shape[1], spec)
    order = _gate_up_order(width, packed.gu_q.device)
    return RepackedExperts(
        gate_up=_blocks(packed.gu_q[:, order], packed.gu_s[:, order], packed.gu_z[:, order], gate_up),
        down=_blocks(packed.dn_q, packed.dn_s, packed.dn_z, down),
        spec=spec,
    )


def _gate_up_order(inner: int, device: torch.device) -> torch.Tensor:
    """Row order of gate_up that puts 8 gate rows and their 8 up rows next to each other."""
    block = torch.arange(inner, device=device).view(-1, 1, 8)
    return torch.cat((block, block + inner), dim=1).flatten()


def unpack_layer(repacked: RepackedExperts, config: ModelConfig) -> PackedExperts:
    """The inverse of `repack`, bit for bit."""
    gate_up, down = product_tiles(config.hidden_size, repacked.spec)
    back = _gate_up_order(config.moe_intermediate_size, repacked.gate_up.device).argsort()
    gu_q, gu_s, gu_z = _unpacked(repacked.gate_up, 2 * config.moe_intermediate_size, gate_up)
    return PackedExperts(
        gu_q[:, back], gu_s[:, back], gu_z[:, back], *_unpacked(repacked.down, config.hidden_size, down)
    )


def _blocks(packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, tile: GemmTile) -> torch.Tensor:
    """uint8 [E, R, K/2] and fp16 [E, R, G] twice -> uint8 [E, R/rows * G, bytes], in the order of `_block_order`."""
    parts = (_words(packed, tile).flatten(3).view(torch.uint8), _scales(scale, zero, tile).view(torch.uint8))
    blocks = torch.cat(parts, dim=-1)
    place = _block_order(blocks.shape[1], blocks.shape[2]).flatten().argsort().to(blocks.device)
    return blocks.flatten(1, 2)[:, place].contiguous()


def _unpacked(blocks: torch.Tensor, rows: int, tile: GemmTile) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inverse of `_blocks` for R = rows weight rows."""
    tiles = rows // tile.rows
    ordered = blocks[:, _block_order(tiles, blocks.shape[1] // tiles).to(blocks.device)]
    words, both = ordered.split([tile.rows * tile.k_block // 2, tile.rows * 4], dim=-1)
    words = _swizzled(words.contiguous().view(torch.int16).unflatten(-1, (tile.rows, -1)))
    quarters = torch.stack([(words >> (4 * j) & 15).to(torch.uint8) for j in range(4)], dim=-2)
    halves = both.contiguous().view(torch.float16).unflatten(-1, (tile.rows, 2)).transpose(2, 3).flatten(1, 2)
    return (
        pack_nibbles(quarters.transpose(2, 3).flatten(3).flatten(1, 2)),
        halves[..., 0].contiguous(),
        halves[..., 1].contiguous(),
    )


def _words(packed: torch.Tensor, tile: GemmTile) -> torch.Tensor:
    """uint8 [E, R, K/2] -> int16 [E, R/rows, K/k_block, rows, k_block/4].

    Nibble j of word c in a block is k = j * k_block/4 + c: the same nibble of all words is a contiguous quarter.
    """
    quarters = unpack_nibbles(packed).unflatten(-1, (-1, 4, tile.k_block // 4)).unflatten(1, (-1, tile.rows))
    words = torch.zeros_like(quarters[..., 0, :], dtype=torch.int32)
    for j in range(4):
        words |= quarters[..., j, :].to(torch.int32) << (4 * j)
    return _swizzled(words.to(torch.int16).transpose(2, 3))


def _swizzled(words: torch.Tensor) -> torch.Tensor:
    """Pieces of 8 words of every row [..., rows, C] in the places the kernels read them from; its own inverse."""
    rows, columns = words.shape[-2:]
    pieces = columns // 8
    flip = torch.arange(rows, device=words.device) * pieces // 8 % pieces
    place = (torch.arange(pieces, device=words.device) ^ flip[:, None])[..., None].expand(rows, pieces, 8)
    blocks = words.unflatten(-1, (pieces, 8))
    return blocks.gather(-2, place.expand(blocks.shape)).flatten(-2).contiguous()


def _scales(scale: torch.Tensor, zero: torch.Tensor, tile: GemmTile) -> torch.Tensor:
    """fp16 [E, R, G] twice -> int32 [E, R/rows, G, rows]: scale in the low half, zero point in the high half."""
    both = torch.stack((scale, zero), dim=-1).unflatten(1, (-1, tile.rows)).transpose(2, 3).contiguous()
    return both.view(torch.int32).squeeze(-1)


def _block_order(tiles: int, groups: int) -> torch.Tensor:
    """Where block (tile, group) lies, int64 [tiles, groups]: one group of three row tiles is read in one piece."""
    tile, group = torch.arange(tiles)[:, None], torch.arange(groups)[None, :]
    first = tile // READ_TILES * READ_TILES
    return first * groups + group * (tiles - first).clamp(max=READ_TILES) + tile - first
