"""What changes inside transformers' `generate`: entropy once a pass, and static caches without torch.compile."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaAdaptiveStopping,
    EntropyBoundSampler,
)

from redraft.config import DecodeSettings, Tier
from redraft.decode.entropy_bound import StopTest, accept

_HOOKS = ("_prepare_sampler", "_prepare_diffusion_stopping_criteria")


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

    def __init__(self, settings: DecodeSettings, sampler: EntropyOnceSampler):
        self._settings, self._sampler = settings, sampler
        self.reset()

    def __call__(self, argmax_canvas: torch.Tensor, logits: torch.Tensor, **kwargs: Any) -> Any:
        """bool [B] from the pass's argmax int64 [B, C]; the sampler's `accept_canvas` has seen its logits."""
        return self._test(argmax_canvas, self._sampler.entropy)

    def reset(self) -> None:
        """Forget the earlier canvases."""
        self._test = StopTest(self._settings)


def _prepare_sampler(model: Any, generation_config: Any) -> EntropyOnceSampler:
    sampler = EntropyOnceSampler(
        config=generation_config.sampler_config,
        canvas_length=model.config.canvas_length,
        vocab_size=model.config.text_config.vocab_size,
        max_denoising_steps=generation_config.max_denoising_steps,
    )
    # Each call has a generation config of its own, so calls in several threads do not meet.
    generation_config._entropy_sampler = sampler
    return sampler


def _prepare_diffusion_stopping_criteria(model: Any, generation_config: Any) -> EntropyOnceStopping | None:
    stability, confidence = generation_config.stability_threshold, generation_config.confidence_threshold
    if stability is None or confidence is None:
        return None
    settings = DecodeSettings(stability_threshold=stability, confidence_threshold=confidence)
    return EntropyOnceStopping(settings, generation_config._entropy_sampler)


def _run_uncompiled(model: Any, sampler: Any, stopping: Any) -> tuple[Any, Any, Any, Any]:
    """In place of `_compile_functions`: what a static cache compiles, as it is.

    Packed experts read how many rows each expert has, which `fullgraph` forbids; and the compiled sampler would keep
    the entropy bound of the first call.
    """
    return model.model.encoder, model.forward, sampler, stopping


def install(model: Any, tier: Tier) -> None:
    """Make `model.generate` run a tier, whatever tier ran before."""
    model._compile_functions = MethodType(_run_uncompiled, model)
    for name in _HOOKS:
        model.__dict__.pop(name, None)
    if tier != "off":
        model._prepare_sampler = MethodType(_prepare_sampler, model)
        model._prepare_diffusion_stopping_criteria = MethodType(_prepare_diffusion_stopping_criteria, model)
