"""Products of rows with a weight by the matrix library: the same bits for a canvas, however many are beside it.

The library chooses a kernel by the number of rows, and some kernels share the summed dimension out among programs: rows
@ weight may give a row other bits in a larger product. Here rows come in blocks of a canvas. Blocks are multiplied
together where that gives the bits of one block after the other, which is tried out, for each shape, on random rows;
else one after the other. `Products` is for a GPU's passes, into buffers; `linear` for a CPU's, in blocks of few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

# Libraries have other code for a few rows than for many, and for what is left of a tile: `linear` takes whole tiles.
ROW_MULTIPLE = 16
TRIED_ELEMENTS = 1 << 20
_together: dict[Hashable, bool] = {}


def linear(x: torch.Tensor, weight: torch.Tensor, batch_invariant: bool = False) -> torch.Tensor:
    """x [..., K] @ weight [N, K]^T -> [..., N].

    batch_invariant: on a CPU a row's bits do not depend on the other rows, of which there are a multiple of
    ROW_MULTIPLE.
    """
    if not batch_invariant:
        return F.linear(x, weight)
    rows = x.reshape(-1, x.shape[-1])
    key = (rows.shape[0], weight.shape, weight.stride(), weight.dtype, torch.get_num_threads())
    if key not in _together:
        tried = _cancelling(rows, weight)
        _together[key] = torch.equal(F.linear(*tried), _apart(*tried))
    out = F.linear(rows, weight) if _together[key] else _apart(rows, weight)
    return out.view(*x.shape[:-1], -1)


def _apart(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([F.linear(block, weight) for block in rows.split(ROW_MULTIPLE)])


def _cancelling(rows: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers of these shapes and strides whose sums are all zero but for what rounding leaves.

    Rounding to BF16 would hide most differences of any others.
    """
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(weight.shape[1], generator=generator)
    half = len(order) // 2
    tried = torch.zeros_like(rows), torch.zeros_like(weight)
    for each, sign in zip(tried, (1, -1), strict=True):
        random = torch.randn(len(each), half, generator=generator).to(each.dtype)
        each[:, order[:half]], each[:, order[half : 2 * half]] = random, sign * random
    return tried


class Products:
    """Products of a network whose canvases have `block` rows, and which shapes of them may be made at once."""

    def __init__(self, block: int):
        self._block = block
        self._together: dict[Hashable, bool] = {}
        self._trying = False

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """out [R, N] = x [R, K] @ weight [K, N], R a multiple of the block or less than one."""
        self.choose(
            (x.shape, weight.shape, weight.stride()), x, out,
            lambda: torch.mm(x, weight, out=out), lambda rows: torch.mm(x[rows], weight, out=out[rows]),
        )  # fmt: skip

    def choose(
        self, key: Hashable, x: torch.Tensor, out: torch.Tensor,
        together: Callable[[], object], apart: Callable[[slice], object],
    ) -> None:  # fmt: skip
        """Make out [R, N] from x [R, K]: all rows `together` if that is known to give the bits of blocks `apart`."""
        blocks = [slice(start, start + self._block) for start in range(0, x.shape[0], self._block)]
        if self._trying and len(blocks) > 1 and key not in self._together and not _capturing(x):
            self._together[key] = _tried(x, out, blocks, together, apart)
        if self._together.get(key):
            together()
            return
        for rows in blocks:
            apart(rows)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Try out shapes that are met for the first time, with random numbers in the place of their rows.

        For passes ahead of a capture. Elsewhere unknown shapes are multiplied block by block.
        """
        self._trying = True
        try:
            yield
        finally:
            self._trying = False


def _tried(
    x: torch.Tensor, out: torch.Tensor, blocks: list[slice], together: Callable[[], object],
    apart: Callable[[slice], object],
) -> bool:  # fmt: skip
    """Whether random rows get the same bits in both ways. Rounding hides most differences: few are tried repeatedly."""
    for _ in range(-(-TRIED_ELEMENTS // out.numel())):
        x.normal_()
        together()
        if not all(_same(out, rows, apart) for rows in blocks):
            return False
    return True


def _same(out: torch.Tensor, rows: slice, apart: Callable[[slice], object]) -> bool:
    together = out[rows].clone()
    apart(rows)
    return torch.equal(out[rows], together)


def _capturing(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
