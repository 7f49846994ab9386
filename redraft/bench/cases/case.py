"""What a case of `bench kernels` is: a kernel, the shapes it runs at, and a problem with its reference."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from redraft.bench.roofline import Work
from redraft.config import LayerConfig, LayerKind, ModelConfig, QuantSpec

Tensors = dict[str, torch.Tensor]
Changes = Mapping[str, Any]  # of the fields of a kernel's launch settings


@dataclass(frozen=True)
class Scale:
    """The shapes of a case: a network, slots in the batch and committed positions of each."""

    config: ModelConfig
    spec: QuantSpec
    batch: int
    prefix: int
    device: torch.device
    dtype: torch.dtype = torch.bfloat16

    @property
    def rows(self) -> int:
        return self.batch * self.config.canvas_length

    def layer(self, kind: LayerKind) -> LayerConfig:
        return next(layer for layer in self.config.layers if layer.kind == kind)

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)


@dataclass
class Problem:
    """One case with its inputs.

    run: launch into `outputs`. outputs: by name, views that `run` fills. reference: what they should hold, computed in
    torch from the same inputs, in any dtype; an output it leaves out must repeat but is not compared. tolerance: the
    largest relative error ||out - ref|| / ||ref|| of a floating output; integers must be equal. stock: the same
    operation as a user of torch writes it. compiles: whether torch.compile makes sense on it. starts: what outputs that
    are inputs too hold before a run, in place of poison. reset: restore before a run what else it changes.
    """

    run: Callable[[], object]
    outputs: Tensors
    reference: Callable[[], Tensors]
    work: Work
    tolerance: float
    stock: Callable[[], object] | None = None
    compiles: bool = False
    starts: Tensors = field(default_factory=dict)
    reset: Callable[[], object] = field(default=lambda: None)


@dataclass(frozen=True)
class KernelCase:
    """A kernel to check and to time. name: `kernel` or `kernel.variant`, the kernel being the file in kernels/.

    candidates: changes for `redraft tune kernels` to try; none where the kernel has no settings.
    """

    name: str
    build: Callable[[Scale, torch.Generator, Changes], Problem]
    candidates: tuple[Changes, ...] = ()
