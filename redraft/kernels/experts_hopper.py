"""The routed experts' products on Hopper, in CUDA C++: FP8 tensor cores, 4-bit weights, 16-bit activations.

At a canvas of 256 rows an expert sees some 16 of them, and BF16 products take longer than streaming the weights: the
tensor cores are fed 64 x 16 weights at a time whatever the number of rows. FP8 halves that, and loses nothing here:

* A nibble q in the low half of a byte *is* the e4m3 number q * 2^-9, because subnormals and the binade above them are
  spaced alike. Unpacking four weights is one mask.
* e4m3 has 4 significant bits and BF16 has 8, so an activation is two of them, x = (high + low) / scale: exactly down to
  2^-9 of the largest value that it shares `scale` with, and to within 2^-17 of that value below. scale is a power of
  two: of a whole row for gate and up, of a row's group for down, whose tiles do not see whole rows. Both parts are
  token columns of one product, which are free up to 64; tiles of more than 32 rows take two products, one after the
  other (6 % slower than a sum of both parts within the tensor core, whose bits would depend on the tile).

    acc += s * ((512 / scale) * (dot(q 2^-9, high) + dot(q 2^-9, low)) - z * sum(x))     for every group

Weights and scales are as in `experts_layout.py`. Split rows are uint8 [rows, groups, 2 (high, low), G]: byte 32 t + p
of a part holds column k = j * G/4 + 16 * (t // 2) + 8 * (p // 16) + (p % 16) // 2 with j = t % 2 + 2 * (p % 2), which
is the order in which masked words hold their nibbles.

Both products are one launch of a block per multiprocessor. Blocks take tiles from a counter, so that one that got its
weights sooner does more of them; a tile of the second product waits until the first has written its rows. `state`
holds the counter and what is written, and is zeroed with every split.

torch compiles the source when it is first needed (NVRTC, part of torch's CUDA build). Where that cannot be, or the
kernel fails its first check (`experts.py`), the Triton kernels do the work.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from redraft.config import QuantSpec
from redraft.kernels.experts_layout import READ_TILES
from redraft.kernels.slots import Slots, max_tiles
from redraft.kernels.weights import RepackedExperts

SOURCE = Path(__file__).with_name("experts_hopper.cu")
ROW_TILE = 128
OUT_ROWS = 32  # token rows of a tile that are written at a time
SPLIT_ROWS = 4  # a block, each by one warp


@dataclass(frozen=True)
class Tile:
    """How token rows are multiplied: at most `rows` in a tile, by `warpgroups`, beside the one that loads.

    Registers are those of a thread. A block's threads start with 65536 / threads, rounded down to a multiple of 8, and
    exchange them: a warpgroup that asks for more than the others gave back waits for ever.
    """

    rows: int
    warpgroups: int
    producer_registers: int
    consumer_registers: int

    @property
    def threads(self) -> int:
        return (self.warpgroups + 1) * 128


# A canvas brings an expert some 16 rows. In tiles of 64 weights are unpacked half as often, but registers suffice for
# three warpgroups only, which take longer over fewer rows. A row gives the same bits in either.
SMALL, LARGE = Tile(32, 4, 64, 104), Tile(64, 3, 80, 144)


def tile_for(rows: int, top_k: int, experts: int) -> Tile:
    """The tile for `rows` rows that visit `top_k` of `experts` experts each."""
    return LARGE if rows * top_k > experts * LARGE.rows else SMALL


class HopperProducts:
    """Both products of layers of one shape, compiled for the current device. Raises RuntimeError when torch cannot."""

    def __init__(self, hidden: int, width: int, spec: QuantSpec, device: torch.device):
        properties = torch.cuda.get_device_properties(device)
        self._limit: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        self.hidden, self.width, self.spec = hidden, width, spec
        self.blocks: int = properties.multi_processor_count
        with torch.cuda.device(device):
            self.multiply = {tile: self._compile(tile) for tile in (SMALL, LARGE)}  # and bytes of shared memory
            self.split = _compiled("#define ONLY_SPLIT\n" + self._source(SMALL)[0], "split_rows")

    def _compile(self, tile: Tile) -> tuple[Any, int]:
        source, shared = self._source(tile)
        kernel = _compiled(source, "experts_products")
        kernel.set_shared_memory_config(shared)
        return kernel, shared

    def _source(self, tile: Tile) -> tuple[str, int]:
        shared, stages_up, stages_down = _shared_memory(self.hidden, self.width, self.spec, tile, self._limit)
        macros = {
            "HIDDEN": self.hidden, "WIDTH": self.width, "GROUP_UP": self.spec.group_gate_up,
            "GROUP_DOWN": self.spec.group_down, "READ_TILES": READ_TILES, "NMAX": tile.rows, "NOUT": OUT_ROWS,
            "STAGES_UP": stages_up, "STAGES_DOWN": stages_down, "WGS": tile.warpgroups,
            "PRODUCER_REGS": tile.producer_registers, "CONSUMER_REGS": tile.consumer_registers,
        }  # fmt: skip
        defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
        return defines + SOURCE.read_text("utf-8"), shared


def _compiled(source: str, name: str) -> Any:
    """Kernel `name` of a source, compiled by torch (NVRTC) or found where Triton keeps its kernels."""
    from torch.cuda._utils import _cuda_load_module, _nvrtc_compile
    from triton.runtime.cache import get_cache_manager

    versions = (str(torch.__version__), str(torch.version.cuda))
    cache = get_cache_manager(hashlib.sha256("\0".join((source, name, *versions)).encode()).hexdigest())
    path = cache.get_file(f"{name}.cubin")
    if path is None:
        path = cache.put(_nvrtc_compile(source, name, "90a")[0], f"{name}.cubin")
    return _cuda_load_module(Path(path).read_bytes(), [name])[name]  # type: ignore[index]


class HopperBuffers:
    """What the products read and write for `rows` rows of `top_k` of `experts` experts each."""

    def __init__(self, products: HopperProducts, rows: int, top_k: int, experts: int, device: torch.device):
        hidden, width, spec, slots = products.hidden, products.width, products.spec, rows * top_k
        self.products, self.tile = products, tile_for(rows, top_k, experts)
        self.split = torch.empty(rows, 2 * hidden, dtype=torch.uint8, device=device)
        self.sums = torch.empty(rows, hidden // spec.group_gate_up, device=device)  # in units of 512 / scale
        self.unscale = torch.empty(rows, device=device)  # 512 / scale
        self.inner_split = torch.empty(slots, 2 * width, dtype=torch.uint8, device=device)
        self.inner_stats = torch.empty(slots, width // spec.group_down, 2, device=device)  # sum and 512 / scale
        self.out = torch.empty(slots, hidden, dtype=torch.bfloat16, device=device)
        tiles = max_tiles(rows, top_k, experts, self.tile.rows)
        self.state = torch.zeros(1 + tiles, dtype=torch.int32, device=device)

    @property
    def tile_rows(self) -> int:
        return self.tile.rows

    def split_rows(self, x: torch.Tensor) -> None:
        """x BF16 [rows, H] into `split`, `sums` and `unscale`; before every `multiply`."""
        self.products.split(
            grid=(-(-x.shape[0] // SPLIT_ROWS), 1, 1),
            block=(32 * SPLIT_ROWS, 1, 1),
            args=[x, self.split, self.sums, self.unscale, x.shape[0], self.state, self.state.shape[0]],
        )

    def multiply(self, experts: RepackedExperts, slots: Slots) -> None:
        """Every slot's expert output into `out`. slots: tiles of `tile_rows`."""
        count = slots.row_of.shape[0]
        once = count <= experts.gate_up.shape[0] * self.tile.rows // 2  # few experts have a second tile
        kernel, shared = self.products.multiply[self.tile]
        kernel(
            grid=(self.products.blocks, 1, 1),
            block=(self.tile.threads, 1, 1),
            shared_mem=shared,
            args=[
                self.split, self.sums, self.unscale, experts.gate_up, experts.down, slots.row_of, slots.tile_expert,
                slots.tile_start, slots.tile_expert.shape[0], count, once, self.inner_split, self.inner_stats,
                self.out, self.state,
            ],
        )  # fmt: skip


@lru_cache
def hopper_products(hidden: int, width: int, spec: QuantSpec, device: torch.device) -> HopperProducts | None:
    """The products of layers of these shapes, or None where the Triton kernels have to do."""
    if why_not(hidden, width, spec, device) is not None:
        return None
    try:
        return HopperProducts(hidden, width, spec, device)
    except (RuntimeError, OSError, AttributeError, TypeError, ImportError):  # no NVRTC, or another private interface
        return None


def why_not(hidden: int, width: int, spec: QuantSpec, device: torch.device) -> str | None:
    """Why these shapes or this device cannot use the products; None when they should."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    if not hasattr(torch.cuda, "_compile_kernel"):
        return "needs torch with its runtime compiler"
    if spec.group_down != 64 or spec.group_gate_up not in (64, 128):
        return "needs groups of 64 in the down projection and of 64 or 128 in gate and up"
    if width < 2 * spec.group_down or hidden < 2 * spec.group_gate_up:
        return "needs at least two groups in every product"
    if hidden % max(ROW_TILE, spec.group_gate_up) or width % 64:
        return "needs a hidden size that is a multiple of 128 and an expert width that is one of 64"
    return None


def _shared_memory(hidden: int, width: int, spec: QuantSpec, tile: Tile, limit: int) -> tuple[int, int, int]:
    """Bytes of shared memory, and stages of either product; see the map in the source.

    A product has at most as many stages as groups: stats have two buffers, and the loads may not run two items ahead.
    """
    up_groups, down_groups = hidden // spec.group_gate_up, width // spec.group_down
    stats = tile.rows * 4 * max(up_groups + 1, 2 * down_groups)
    fixed = 2 * stats + tile.warpgroups * OUT_ROWS * (2 * 64 + 16) + 512  # 512: barriers and items

    def stage(group: int) -> int:
        return tile.warpgroups * (ROW_TILE * 4 + ROW_TILE * group // 2) + tile.rows * 2 * group

    space = limit - 1024 - fixed
    up = min(16, up_groups, space // stage(spec.group_gate_up))
    down = min(16, down_groups, space // stage(spec.group_down))
    if min(up, down) < 2:
        raise RuntimeError(f"a multiprocessor's {limit} bytes of shared memory hold less than two stages")
    return max(up * stage(spec.group_gate_up), down * stage(spec.group_down)) + fixed, up, down
