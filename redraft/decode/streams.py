"""Where a decoder's random numbers come from.

`TorchStream` draws from one torch generator in transformers' order, so that the same torch seed gives the same tokens.
`CounterStream` keys every number by (seed, canvas, pass, position): a request's text does not depend on its batch.
"""

from __future__ import annotations

from typing import Protocol

import torch

from redraft.kernels.sampling import Statistics, counter_statistics, random_tokens, stock_statistics


class Stream(Protocol):
    """Random draws of one batch. Canvas and pass numbers start at 0 and 1."""

    def tokens(self, canvas: int, step: int) -> torch.Tensor:
        """Uniform tokens int64 [B, C]: the first canvas (step 0) or the re-draw after pass `step`."""
        ...

    def statistics(self, logits: torch.Tensor, canvas: int, step: int) -> Statistics:
        """Statistics of temperature-scaled logits [B, C, V], with one drawn token per position."""
        ...


class TorchStream:
    """transformers' draws: per canvas a randint, then per pass a multinomial and a randint, for the whole batch."""

    def __init__(self, seed: int, batch: int, length: int, vocab: int, device: torch.device):
        self._generator = torch.Generator(device=device)
        self._generator.manual_seed(seed)
        self._shape, self._vocab, self._device = (batch, length), vocab, device

    def tokens(self, canvas: int, step: int) -> torch.Tensor:
        return torch.randint(0, self._vocab, self._shape, generator=self._generator, device=self._device)

    def statistics(self, logits: torch.Tensor, canvas: int, step: int) -> Statistics:
        return stock_statistics(logits, self._generator)


class CounterStream:
    """Counter-based draws, one seed per row."""

    def __init__(self, seeds: list[int], length: int, vocab: int, device: torch.device):
        self._seeds = torch.tensor(seeds, dtype=torch.int64, device=device)
        self._length, self._vocab = length, vocab

    def tokens(self, canvas: int, step: int) -> torch.Tensor:
        return random_tokens(self._seeds, self._length, self._vocab, canvas, step)

    def statistics(self, logits: torch.Tensor, canvas: int, step: int) -> Statistics:
        return counter_statistics(logits, self._seeds, canvas, step)
