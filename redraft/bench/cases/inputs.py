"""What cases share: random inputs, candidates, and problems whose reference is a formula."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from redraft.bench.cases.case import Problem, Scale, Tensors
from redraft.bench.roofline import Work
from redraft.config import DecodeSettings
from redraft.kernels.state import SlotState

SETTINGS = DecodeSettings()

# BF16 keeps 8 bits: one rounding is off by at most 2^-8 and, over many values, by 2^-8 / sqrt(12) = 1.1e-3 of the size
# of their binade. A chain of a few roundings against a reference in fp32 stays below this.
BF16_TOLERANCE = 6e-3


def by_formula(
    run: Callable[[], object], outputs: Tensors, formula: Callable[..., Any], inputs: Sequence[torch.Tensor],
    work: Work, tolerance: float = BF16_TOLERANCE, *, compiles: bool = True, starts: Tensors | None = None,
) -> Problem:  # fmt: skip
    """The problem whose reference is a formula of its inputs in fp32, and whose stock form the formula of them as is.

    formula: the outputs in their order, a tensor or a tuple of them.
    """

    def reference() -> Tensors:
        found = formula(*(t.float() if t.is_floating_point() else t for t in inputs))
        return dict(zip(outputs, found if isinstance(found, tuple) else (found,), strict=True))

    stock = lambda: formula(*inputs)  # noqa: E731
    return Problem(run, outputs, reference, work, tolerance, stock, compiles, starts or {})


def gaussian(scale: Scale, generator: torch.Generator, *shape: int, std: float = 1.0) -> torch.Tensor:
    """Gaussian numbers in the scale's dtype."""
    return torch.randn(shape, generator=generator, device=scale.device, dtype=scale.dtype) * std


def weight(scale: Scale, generator: torch.Generator, *shape: int) -> torch.Tensor:
    """A norm's weight: around one."""
    return 1 + 0.2 * gaussian(scale, generator, *shape)


def routing(scale: Scale, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights fp32 [R, k] that sum to one and distinct experts int32 [R, k] per row, uniform over experts."""
    scores = torch.rand(scale.rows, scale.config.num_experts, generator=generator, device=scale.device)
    weights, experts = torch.topk(scores, scale.config.top_k_experts)
    return weights / weights.sum(dim=-1, keepdim=True), experts.int()


def lengths(scale: Scale) -> torch.Tensor:
    """Committed positions int32 [B]: the prefix, one less in every further slot."""
    return scale.prefix - torch.arange(scale.batch, dtype=torch.int32, device=scale.device)


def lanes(scale: Scale) -> torch.Tensor:
    """The slot table int32 [B] of a pass over every slot, last first."""
    return torch.arange(scale.batch, dtype=torch.int32, device=scale.device).flip(0)


def first_pass(scale: Scale) -> SlotState:
    """Every slot in the first pass of its first canvas, under the published settings."""
    slots = SlotState.allocate(scale.batch, scale.device)
    for b in range(scale.batch):
        slots.admit(b, seed=b)
    slots.temperature.fill_(SETTINGS.t_max)
    slots.canvas_index.zero_()
    slots.done.zero_()
    return slots


def candidates(names: str, *rows: tuple[int, ...]) -> tuple[dict[str, int], ...]:
    """Candidates: rows of values of the named fields."""
    return tuple(dict(zip(names.split(), row, strict=True)) for row in rows)


def choices(**values: tuple[int, ...]) -> tuple[dict[str, int], ...]:
    """Candidates: every combination of values of some fields."""
    return candidates(" ".join(values), *itertools.product(*values.values()))
