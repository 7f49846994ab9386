"""Random inputs that cases share."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from redraft.bench.kernels import KernelCase, Scale
from redraft.config import DecodeSettings
from redraft.kernels.state import SlotState

CASES: list[KernelCase] = []
SETTINGS = DecodeSettings()

# BF16 keeps 8 bits: one rounding is off by at most 2^-8 and, over many values, by 2^-8 / sqrt(12) = 1.1e-3 of the size
# of their binade. A chain of a few roundings against a reference in fp32 stays below this.
BF16_TOLERANCE = 6e-3


def gaussian(scale: Scale, generator: torch.Generator, *shape: int, std: float = 1.0) -> torch.Tensor:
    """Gaussian numbers in the scale's dtype."""
    return torch.randn(shape, generator=generator, device=scale.device, dtype=scale.dtype) * std


def weight(scale: Scale, generator: torch.Generator, *shape: int) -> torch.Tensor:
    """A norm's weight: around one."""
    return 1 + 0.2 * gaussian(scale, generator, *shape)


def routing(scale: Scale, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights fp32 [R, k] that sum to one and distinct experts int32 [R, k] per row, uniform over experts."""
    config, rows = scale.config, scale.rows
    scores = torch.rand(rows, config.num_experts, generator=generator, device=scale.device)
    weights, experts = torch.topk(scores, config.top_k_experts)
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


def choices(**values: tuple[Any, ...]) -> tuple[dict[str, Any], ...]:
    """Candidates: every combination of values of some fields."""
    return tuple(dict(zip(values, row, strict=True)) for row in itertools.product(*values.values()))


ROWS = choices(elements=(8, 32))  # of norms.RowSettings
