"""Denoising passes as benchmarks run them: the interface, and what every implementation is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from redraft.config import DecodeSettings

# A canvas never runs out of passes, its temperature stays at t_max, and no entropy is low enough to stop.
ENDLESS_SETTINGS = DecodeSettings(max_denoising_steps=10**9, confidence_threshold=1e-30)


class DenoiseStep(Protocol):
    """Denoising passes of a batch over fixed buffers.

    Prepared with `batch` prompts of random tokens encoded and one pass done, so that self-conditioning is in use. The
    number of passes is unlimited and none of them stops early.
    """

    name: str  # of the implementation, for the table
    capturable: bool  # whether each of `parts` may be captured as a CUDA graph

    def run_pass(self) -> object:
        """One whole pass, sampling included, as generation runs it; may return before the device is done."""
        ...

    def run_encode(self) -> object:
        """Encode the same prompts once more from the start; the canvases may begin anew."""
        ...

    def parts(self) -> Mapping[str, Callable[[], object]]:
        """Every part of a pass (`work.PARTS`), all its layers, over the present buffers, whatever they hold."""
        ...


def random_tokens(vocab: int, shape: tuple[int, int], seed: int, device: torch.device) -> torch.Tensor:
    """The prompts of a benchmark, the same for every implementation on one device."""
    return torch.randint(vocab, shape, generator=torch.Generator(device).manual_seed(seed), device=device)
