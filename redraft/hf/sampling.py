"""Tier `turbo` behind the head: one launch over the vocabulary in the place of softmax, draw, argmax and entropy.

A pass's tokens are drawn by the Gumbel-max trick with counter-based numbers (`kernels/sampling.py`), keyed by seeds
that torch's generator gives once a call; the first canvas and the re-draws are transformers' own. So a call is
deterministic for a torch seed, and draws from the same distribution as transformers, but other tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma.generation_diffusion_gemma import LinearTemperatureScheduleLogitsProcessor

from redraft.decode.entropy_bound import accept
from redraft.hf.entropy_once import EntropyOnceSampler
from redraft.kernels.sampling import probabilities, sample
from redraft.kernels.state import SlotState


class Probabilities:
    """softmax(logits / T) [B, C, V] where transformers expects the logits of the pass before.

    The decoder's first steps on them are a softmax and a cast, which have happened.
    """

    def __init__(self, values: torch.Tensor):
        self._values = values

    def softmax(self, dim: int, dtype: torch.dtype) -> Probabilities:
        """Themselves."""
        return self

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """The probabilities as a tensor."""
        return self._values.to(dtype)

    def cpu(self) -> torch.Tensor:
        """For streamers that take logits: log-probabilities, which differ from the logits by a constant a position."""
        return self._values.float().log().cpu()


class FusedSampler(EntropyOnceSampler):
    """The sampler of one call of `generate`, with the statistics of its passes. B rows, C positions each."""

    def __init__(self, generation_config: Any, **kwargs: Any):
        super().__init__(config=generation_config.sampler_config, **kwargs)
        self._settings = generation_config
        self._slots: SlotState | None = None

    def observe(self, logits: torch.Tensor, finished: torch.Tensor, remaining: int, softcap: float) -> Probabilities:
        """Take a pass's raw head outputs [B, C, V], which become the probabilities returned.

        Sets `draw`, `argmax` int64 and `entropy`, `confidence` fp32, all [B, C]; rows that are finished bool [B] keep
        theirs. remaining: passes left in the canvas, this one included.
        """
        batch, length, vocab = logits.shape
        slots = self._start(batch, length, logits.device)
        settings = self._settings
        slots.step.fill_(settings.max_denoising_steps - remaining)
        if settings.t_min is not None and settings.t_max is not None:
            share = torch.tensor(remaining, dtype=torch.int32) / settings.max_denoising_steps
            slots.temperature.fill_(float(settings.t_min + (settings.t_max - settings.t_min) * share))
        slots.done.copy_(finished)
        if remaining == self._settings.max_denoising_steps:
            slots.canvas_index += 1
        flat, log_norm = logits.view(-1, vocab), self._log_norm
        outputs = {name: getattr(self, name).view(-1) for name in ("draw", "argmax", "entropy", "confidence")}
        sample(flat, slots, self._lanes, softcap, **outputs, log_norm=log_norm)
        probabilities(flat, log_norm, slots, self._lanes, softcap, out=flat)
        return Probabilities(logits)

    def _start(self, batch: int, length: int, device: torch.device) -> SlotState:
        if self._slots is None:
            slots = self._slots = SlotState.allocate(batch, device)
            slots.seed.random_()
            slots.canvas_index.fill_(-1)
            self._lanes = torch.arange(batch, dtype=torch.int32, device=device)
            self.draw = torch.zeros(batch, length, dtype=torch.int64, device=device)
            self.argmax = torch.zeros_like(self.draw)
            self.entropy = torch.zeros(batch, length, dtype=torch.float32, device=device)
            self.confidence = torch.zeros_like(self.entropy)
            self._log_norm = torch.zeros(batch * length, dtype=torch.float32, device=device)
        return self._slots


def denoising_step(model: Any, **kwargs: Any) -> tuple[Any, ...]:
    """In place of `_denoising_step`: canvas and argmax int64 [B, C], self-conditioning, and finished bool [B]."""
    if any(type(p) is not LinearTemperatureScheduleLogitsProcessor for p in kwargs["logits_processor"]):
        # The caller's own logits processors want logits, so such a call samples as transformers does.
        return DiffusionGemmaForBlockDiffusion._denoising_step(model, **kwargs)
    return _fused_step(model, **kwargs)


def _fused_step(
    model: Any,
    *,
    current_canvas: torch.Tensor,
    argmax_canvas: torch.Tensor,
    self_conditioning_logits: Any,
    mask_mapping: Any,
    finished_denoising: torch.Tensor,
    cur_step: int,
    sampler: FusedSampler,
    diffusion_stopping_criteria: Any,
    input_ids: torch.Tensor,
    decoder_forward: Any,
    logits_processor: Any,
    **model_kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor, Probabilities, torch.Tensor]:
    # Past `decoder_forward`, which caps the logits in fp32.
    hidden = model.model(
        decoder_input_ids=current_canvas,
        self_conditioning_logits=self_conditioning_logits,
        decoder_attention_mask=mask_mapping,
        **model_kwargs,
    ).last_hidden_state
    probs = sampler.observe(model.lm_head(hidden), finished_denoising, cur_step, model.final_logit_softcapping)
    sampler.accepted_token_mask = accept(sampler.entropy, sampler.entropy_bound)
    accepted: Any = torch.where(sampler.accepted_token_mask, sampler.draw, current_canvas)
    keep = finished_denoising[:, None]
    canvas = torch.where(keep, current_canvas, sampler.renoise_canvas(accepted, cur_step))
    argmax: Any = torch.where(keep, argmax_canvas, sampler.argmax)
    if diffusion_stopping_criteria is not None:
        finished_denoising = finished_denoising | diffusion_stopping_criteria(argmax)
    return canvas, argmax, probs, finished_denoising
