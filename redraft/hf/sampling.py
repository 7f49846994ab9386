"""What a tier does behind the head in transformers' `generate`.

`bitexact`: a pass's entropies are computed once, for acceptance and for the stop test.

`turbo`: one launch over the vocabulary in the place of softmax, draw, argmax and entropy. Tokens are drawn by the
Gumbel-max trick with counter-based numbers (`kernels/sampling.py`), keyed by seeds that torch's generator gives once a
call; the first canvas and the re-draws are transformers' own. So a call is deterministic for a torch seed, and draws
from the same distribution as transformers, but other tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaAdaptiveStopping,
    EntropyBoundSampler,
    LinearTemperatureScheduleLogitsProcessor,
)

from redraft.config import DecodeSettings
from redraft.decode.entropy_bound import accept
from redraft.kernels.sampling import probabilities, sample
from redraft.kernels.state import SlotState


class EntropyOnceSampler(EntropyBoundSampler):
    """transformers' sampler of one call, which leaves a pass's entropies [B, C] to the stop test of the same pass."""

    entropy: torch.Tensor
    accepted_token_mask: Any  # bool [B, C]; transformers starts with None

    def __init__(self, model: Any, generation_config: Any):
        shapes = model.config.canvas_length, model.config.text_config.vocab_size
        super().__init__(generation_config.sampler_config, *shapes, generation_config.max_denoising_steps)
        self._settings = generation_config
        # Each call has a generation config of its own, so calls in several threads do not meet.
        generation_config._entropy_sampler = self

    def accept_canvas(
        self, current_canvas: torch.Tensor, denoiser_canvas: torch.Tensor, logits: torch.Tensor, cur_step: Any
    ) -> Any:
        """int64 [B, C]: drawn tokens where accepted, the current ones elsewhere; logits [B, C, V]."""
        self.entropy = torch.distributions.Categorical(logits=logits).entropy()
        return self._accept(current_canvas, denoiser_canvas)

    def _accept(self, current_canvas: torch.Tensor, drawn: torch.Tensor) -> Any:
        self.accepted_token_mask = accept(self.entropy, self.entropy_bound)
        return torch.where(self.accepted_token_mask, drawn, current_canvas)


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


class Probabilities:
    """softmax(logits / T) [B, C, V] where transformers expects the logits of the pass before.

    The decoder's first steps on them are a softmax and a cast, which have happened.
    """

    def __init__(self, values: torch.Tensor):
        self._values = values

    def softmax(self, dim: int, dtype: torch.dtype) -> Probabilities:
        return self

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        return self._values.to(dtype)

    def cpu(self) -> torch.Tensor:
        """For streamers that take logits: log-probabilities, which differ from the logits by a constant a position."""
        return self._values.float().log().cpu()


class FusedSampler(EntropyOnceSampler):
    """The sampler of one call of `generate`, with the statistics of its passes. B rows, C positions each."""

    _slots: SlotState | None = None

    def observe(self, logits: torch.Tensor, finished: torch.Tensor, remaining: int, softcap: float) -> Probabilities:
        """Take a pass's raw head outputs [B, C, V], which become the probabilities returned.

        Sets `draw`, `argmax` int64 and `entropy`, `confidence` fp32, all [B, C]; rows that are finished bool [B] keep
        theirs. remaining: passes left in the canvas, this one included.
        """
        slots, settings = self._start(logits), self._settings
        slots.step.fill_(settings.max_denoising_steps - remaining)
        if settings.t_min is not None and settings.t_max is not None:
            share = torch.tensor(remaining, dtype=torch.int32) / settings.max_denoising_steps
            slots.temperature.fill_(float(settings.t_min + (settings.t_max - settings.t_min) * share))
        slots.done.copy_(finished)
        slots.canvas_index += int(remaining == settings.max_denoising_steps)
        flat = logits.view(-1, logits.shape[-1])
        outputs = {name: getattr(self, name).view(-1) for name in ("draw", "argmax", "entropy", "confidence")}
        sample(flat, slots, self._lanes, softcap, **outputs, log_norm=self._log_norm)
        probabilities(flat, self._log_norm, slots, self._lanes, softcap, out=flat)
        return Probabilities(logits)

    def _start(self, logits: torch.Tensor) -> SlotState:
        if self._slots is None:
            (batch, length, _), device = logits.shape, logits.device
            slots = self._slots = SlotState.allocate(batch, device)
            slots.seed.random_()
            slots.canvas_index.fill_(-1)
            self._lanes = torch.arange(batch, dtype=torch.int32, device=device)
            self.draw, self.argmax = torch.zeros(2, batch, length, dtype=torch.int64, device=device)
            self.entropy, self.confidence = torch.zeros(2, batch, length, device=device)
            self._log_norm = torch.zeros(batch * length, device=device)
        return self._slots


def denoising_step(model: Any, **kwargs: Any) -> tuple[Any, ...]:
    """In place of `_denoising_step`: canvas and argmax int64 [B, C], self-conditioning, and finished bool [B]."""
    if any(type(p) is not LinearTemperatureScheduleLogitsProcessor for p in kwargs["logits_processor"]):
        # The caller's own logits processors want logits, so such a call samples as transformers does.
        return DiffusionGemmaForBlockDiffusion._denoising_step(model, **kwargs)
    return _fused_step(model, **kwargs)


def _fused_step(
    model: Any, *, current_canvas: torch.Tensor, argmax_canvas: torch.Tensor, self_conditioning_logits: Any,
    mask_mapping: Any, finished_denoising: torch.Tensor, cur_step: int, sampler: FusedSampler,
    diffusion_stopping_criteria: Any, input_ids: Any, decoder_forward: Any, logits_processor: Any, **model_kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor, Probabilities, torch.Tensor]:  # fmt: skip
    # Past `decoder_forward`, which caps the logits in fp32.
    hidden = model.model(
        decoder_input_ids=current_canvas, self_conditioning_logits=self_conditioning_logits,
        decoder_attention_mask=mask_mapping, **model_kwargs,
    ).last_hidden_state  # fmt: skip
    probs = sampler.observe(model.lm_head(hidden), finished_denoising, cur_step, model.final_logit_softcapping)
    fresh = sampler.renoise_canvas(sampler._accept(current_canvas, sampler.draw), cur_step)
    keep = finished_denoising[:, None]
    canvas = torch.where(keep, current_canvas, fresh)
    argmax: Any = torch.where(keep, argmax_canvas, sampler.argmax)
    if diffusion_stopping_criteria is not None:
        finished_denoising = finished_denoising | diffusion_stopping_criteria(argmax)
    return canvas, argmax, probs, finished_denoising
