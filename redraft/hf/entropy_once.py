"""Tier `bitexact`: a pass's entropies are computed once, for acceptance and for the stop test."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaAdaptiveStopping,
    EntropyBoundSampler,
)

from redraft.config import DecodeSettings
from redraft.decode.entropy_bound import accept


class EntropyOnceSampler(EntropyBoundSampler):
    """transformers' sampler, which leaves a pass's entropies to the stop test of the same pass."""

    entropy: torch.Tensor
    accepted_token_mask: Any  # bool [B, C]; transformers starts with None

    def accept_canvas(
        self, current_canvas: torch.Tensor, denoiser_canvas: torch.Tensor, logits: torch.Tensor, cur_step: Any
    ) -> Any:
        """int64 [B, C]: drawn tokens where accepted, the current ones elsewhere; logits [B, C, V]."""
        self.entropy = torch.distributions.Categorical(logits=logits).entropy()
        self.accepted_token_mask = accept(self.entropy, self.entropy_bound)
        return torch.where(self.accepted_token_mask, denoiser_canvas, current_canvas)


class EntropyOnceStopping(DiffusionGemmaAdaptiveStopping):
    """transformers' stable-and-confident test on the entropies that the sampler computed.

    They are the same function of the same logits, except in rows that are done: those carry earlier logits here, and
    what is computed for them is OR-ed with True.
    """

    _earlier: torch.Tensor | None
    _equal: torch.Tensor | int  # passes in a row that left a row's argmax as it was, [B] from the first pass on

    def __init__(self, settings: DecodeSettings, sampler: EntropyOnceSampler):
        self._settings, self._sampler = settings, sampler
        self.reset()

    def __call__(self, argmax_canvas: torch.Tensor, logits: Any = None, **kwargs: Any) -> Any:
        """bool [B] from the pass's argmax int64 [B, C]; the sampler has the entropies of its logits already."""
        sure = self._sampler.entropy.mean(dim=-1) < self._settings.confidence_threshold
        same = torch.zeros_like(sure) if self._earlier is None else (self._earlier == argmax_canvas).all(dim=-1)
        self._equal = torch.where(same, self._equal + 1, 0)
        self._earlier = argmax_canvas
        return sure & (self._equal >= self._settings.stability_threshold)

    def reset(self) -> None:
        """Forget the earlier canvases."""
        self._earlier, self._equal = None, 0
