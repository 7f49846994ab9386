"""Products of rows with a weight by the matrix library: the same bits for a canvas, however many are beside it.

The library chooses a kernel by the number of rows, and some kernels share the summed dimension out among programs: rows
@ weight may give a row other bits in a larger product. Here rows come in blocks of a canvas. Blocks are multiplied
together where that gives the bits of one block after the other, which is tried out, for each shape, on random rows;
else one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch


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
            x.normal_()
            together()
            self._together[key] = all(_same(out, rows, apart) for rows in blocks)
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


def _same(out: torch.Tensor, rows: slice, apart: Callable[[slice], object]) -> bool:
    together = out[rows].clone()
    apart(rows)
    return torch.equal(out[rows], together)


def _capturing(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
