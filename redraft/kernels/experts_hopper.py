"""The routed experts' products on Hopper, in CUDA C++: FP8 tensor cores, 4-bit weights, 16-bit activations.

At a canvas of 256 rows an expert sees some 16 of them, and BF16 products take longer than streaming the weights: the
tensor cores are fed 64 x 16 weights at a time whatever the number of rows. FP8 halves that, and loses nothing here:

* A nibble q in the low half of a byte *is* the e4m3 number q * 2^-9, because subnormals and the binade above them are
  spaced alike. Unpacking four weights is one mask.
* e4m3 has 4 significant bits and BF16 has 8, so an activation is two of them, x = (high + low / 16) / scale: exactly
  down to 2^-15 of the largest value that it shares `scale` with, and to within 2^-22 of that value below. scale is a
  power of two: of a whole row for gate and up, of a row's group for down, whose tiles do not see whole rows. Both parts
  are token columns of one product, which are free up to 64.

    acc += s * ((512 / scale) * (dot(q 2^-9, high) + dot(q 2^-9, low) / 16) - z * sum(x))     for every group

Weights and scales are as in `experts_layout.py`. Split rows are uint8 [rows, groups, 2 (high, low), G]: byte 32 t + p
of a part holds column k = j * G/4 + 16 * (t // 2) + 8 * (p // 16) + (p % 16) // 2 with j = t % 2 + 2 * (p % 2), which
is the order in which masked words hold their nibbles.

torch compiles the source when it is first needed (NVRTC, part of torch's CUDA build). Where that cannot be, or the
kernels fail a first check against `experts.py`, the Triton kernels do the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from redraft.config import QuantSpec
from redraft.kernels.cuda_launch import compile_kernel, launch
from redraft.kernels.slots import Slots
from redraft.weights import RepackedExperts

SOURCE = Path(__file__).with_name("experts_hopper.cu")
TOKEN_ROWS = 32  # of a tile, at most
ROW_TILE = 128
WARPGROUPS = 3  # that multiply, READ_TILES of the layout: with fewer the unpacking, with more the registers run short
REGISTERS = {"PRODUCER_REGS": 56, "CONSUMER_REGS": 152}  # a thread; 56 + 3 * 152 = 4 * 128
SPLIT_ROWS = 4  # a block, each by one warp


@dataclass(frozen=True)
class Product:
    """One compiled grouped product over weights [rows, k]."""

    kernel: Any
    shared: int  # bytes
    blocks: int

    def launch(self, *args: torch.Tensor | int, early: bool = False) -> None:
        launch(self.kernel, self.blocks, (WARPGROUPS + 1) * 128, args, self.shared, early=early)


class HopperProducts:
    """Both products of layers of one shape, compiled for the current device. Raises RuntimeError when torch cannot."""

    def __init__(self, hidden: int, width: int, spec: QuantSpec, device: torch.device):
        properties = torch.cuda.get_device_properties(device)
        self.hidden, self.width, self.spec = hidden, width, spec
        shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        limits = (shared, properties.multi_processor_count)
        with torch.cuda.device(device):
            self.gate_up = _product(hidden, spec.group_gate_up, 2 * width, True, *limits)
            self.down = _product(width, spec.group_down, hidden, False, *limits)
            self.split_kernel = _compile("split_rows", K=hidden, KB=spec.group_gate_up, TILES=1, GATED=0, STAGES=1)


class HopperBuffers:
    """What the products read and write for `rows` rows of `top_k` experts each."""

    def __init__(self, products: HopperProducts, rows: int, top_k: int, device: torch.device):
        hidden, width, spec, slots = products.hidden, products.width, products.spec, rows * top_k
        self.products = products
        self.split = torch.empty(rows, 2 * hidden, dtype=torch.uint8, device=device)
        self.sums = torch.empty(rows, hidden // spec.group_gate_up, device=device)  # in units of 512 / scale
        self.unscale = torch.empty(rows, device=device)  # 512 / scale
        self.inner_split = torch.empty(slots, 2 * width, dtype=torch.uint8, device=device)
        self.inner_stats = torch.empty(slots, width // spec.group_down, 2, device=device)  # sum and 512 / scale
        self.out = torch.empty(slots, hidden, dtype=torch.bfloat16, device=device)

    def split_rows(self, x: torch.Tensor) -> None:
        """x BF16 [rows, H] into `split`, `sums` and `unscale`."""
        blocks = -(-x.shape[0] // SPLIT_ROWS)
        args = (x, self.split, self.sums, self.unscale, x.shape[0])
        launch(self.products.split_kernel, blocks, 32 * SPLIT_ROWS, args)

    def multiply(self, experts: RepackedExperts, slots: Slots) -> None:
        """Every slot's expert output into `out`, from rows split before. slots: tiles of TOKEN_ROWS."""
        count = slots.row_of.shape[0]
        tiles = (slots.tile_expert, slots.tile_start, slots.tile_expert.shape[0], count)
        self.products.gate_up.launch(
            self.split, self.sums, self.unscale, experts.gate_up_words, experts.gate_up_scales,
            slots.row_of, *tiles, self.inner_split, self.inner_stats,
        )  # fmt: skip
        # Multiprocessors that have done their part already fetch weights of the second product.
        self.products.down.launch(
            self.inner_split, self.inner_stats, self.unscale, experts.down_words, experts.down_scales,
            slots.row_of, *tiles, self.out, self.inner_stats, early=True,
        )  # fmt: skip


@lru_cache
def hopper_products(hidden: int, width: int, spec: QuantSpec, device: torch.device) -> HopperProducts | None:
    """The products of layers of these shapes, or None where the Triton kernels have to do."""
    if why_not(hidden, width, spec, device) is not None:
        return None
    try:
        return HopperProducts(hidden, width, spec, device)
    except (RuntimeError, OSError, AttributeError, TypeError):  # no NVRTC, no source file, or another private interface
        return None


def why_not(hidden: int, width: int, spec: QuantSpec, device: torch.device) -> str | None:
    """Why these shapes or this device cannot use the products; None when they should."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    if not hasattr(torch.cuda, "_compile_kernel"):
        return "needs torch with its runtime compiler"
    if spec.group_down != 64 or spec.group_gate_up not in (64, 128):
        return "needs groups of 64 in the down projection and of 64 or 128 in gate and up"
    if width < 4 * spec.group_down or hidden < 4 * spec.group_gate_up:
        return "needs at least four groups in every product"
    if hidden % max(ROW_TILE, spec.group_gate_up) or width % 64:
        return "needs a hidden size that is a multiple of 128 and an expert width that is one of 64"
    return None


def _product(k: int, group: int, rows: int, gated: bool, shared: int, blocks: int) -> Product:
    """Compile a product with as many stages as `shared` bytes hold."""
    groups = k // group
    stage = WARPGROUPS * (ROW_TILE * 4 + ROW_TILE * group // 2) + TOKEN_ROWS * 2 * group
    stats = groups + 1 if gated else 2 * groups
    fixed = 2 * stats * TOKEN_ROWS * 4 + WARPGROUPS * TOKEN_ROWS * (2 * (64 if gated else ROW_TILE) + 16)
    # No more than groups: stats have two buffers, and whoever loads may not run two items ahead.
    stages = min(16, groups, (shared - 1024 - fixed) // (stage + 16))
    if stages < 2:
        raise RuntimeError(f"a multiprocessor's {shared} bytes of shared memory hold less than two stages")
    kernel = _compile("experts_product", K=k, KB=group, TILES=rows // ROW_TILE, GATED=int(gated), STAGES=stages)
    size = stages * (stage + 16) + fixed
    kernel.set_shared_memory_config(size)
    return Product(kernel, size, blocks)


def _compile(name: str, **macros: int) -> Any:
    return compile_kernel(SOURCE, name, "90a", {**macros, "WGS": WARPGROUPS, **REGISTERS})
