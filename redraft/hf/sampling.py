"""What tier `bitexact` does behind the head in transformers' `generate`.

A pass's entropies are computed once, for acceptance and for the stop test.
"""

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
    """transformers' sampler of one call, which leaves a pass's entropies [B, C] to the stop test of the same pass."""

    entropy: torch.Tensor
    accepted_token_mask: Any  # bool [B, C]; transformers starts with None

    def __init__(self, model: Any, generation_config: Any):
        shapes = model.config.canvas_length, model.config.text_config.vocab_size
        super().__init__(generation_config.sampler_config, *shapes, generation_config.max_denoising_steps)
        # Each call has a generation config of its own, so calls in several threads do not meet.
        generation_config._entropy_sampler = self

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
        self._earlier, self._equal = None, 0


def stopping_criteria(model: Any, generation_config: Any) -> EntropyOnceStopping | None:
    """In place of `_prepare_diffusion_stopping_criteria`, after the call's sampler."""
    stability, confidence = generation_config.stability_threshold, generation_config.confidence_threshold
    if stability is None or confidence is None:
        return None
    settings = DecodeSettings(stability_threshold=stability, confidence_threshold=confidence)
    return EntropyOnceStopping(settings, generation_config._entropy_sampler)
