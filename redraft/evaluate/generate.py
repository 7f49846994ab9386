"""transformers' `generate` behind the call of our engine, so that both answer and are counted alike."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from redraft.config import DecodeSettings
from redraft.device import peak_bytes
from redraft.engine.events import Result, count_tokens, cut
from redraft.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TransformersEngine:
    """A model of transformers that takes our settings and gives our Result."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, settings: DecodeSettings):
        self.model, self.tokenizer, self.settings = model, tokenizer, settings

    def generate_batch(self, prompts: Sequence[str], *, seed: Sequence[int], **settings: Any) -> list[Result]:
        """Answer user turns one after the other."""
        return [self.generate(prompt, seed=each, **settings) for prompt, each in zip(prompts, seed, strict=True)]

    def generate(self, prompt: str, *, seed: int, **settings: Any) -> Result:
        """Answer one user turn. Raises UsageError for settings that transformers refuses."""
        chosen = self.settings.replace(**settings)
        pad = self.model.config.text_config.pad_token_id or 0
        options = generate_options(chosen)
        began = time.perf_counter()
        chat = [{"role": "user", "content": prompt}]
        encoded: Any = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        ids = torch.tensor([encoded["input_ids"]], device=self.model.device)
        torch.manual_seed(seed)
        with _count_passes(self.model) as steps:
            output = self.model.generate(input_ids=ids, pad_token_id=pad, **options)
        answer = output.sequences[0, ids.shape[1] :].tolist()
        tokens, finish_reason = cut(answer, chosen.eos_token_ids, chosen.max_new_tokens)
        return Result(
            token_ids=tokens,
            tokens=count_tokens(tokens, pad),
            prompt_tokens=ids.shape[1],
            steps_per_canvas=steps,
            seconds=time.perf_counter() - began,
            finish_reason=finish_reason or "length",
            seed=seed,
            peak_memory_bytes=peak_bytes(self.model.device),
            text=str(self.tokenizer.decode(tokens, skip_special_tokens=True)),
        )


def generate_options(settings: DecodeSettings) -> dict[str, Any]:
    """Our settings as keywords of transformers' `generate`: all of them, whatever its generation config says."""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    if settings.t_max == settings.t_min:
        raise UsageError(f"t_max equals t_min ({settings.t_min:g}), which transformers refuses; raise t_max a little")
    return {
        "max_new_tokens": settings.max_new_tokens,
        "max_denoising_steps": settings.max_denoising_steps,
        "sampler_config": EntropyBoundSamplerConfig(entropy_bound=float(settings.entropy_bound)),
        "t_min": float(settings.t_min),
        "t_max": float(settings.t_max),
        "stability_threshold": settings.stability_threshold,
        "confidence_threshold": float(settings.confidence_threshold),
        "eos_token_id": list(settings.eos_token_ids) or None,
    }


@contextmanager
def _count_passes(model: Any) -> Iterator[list[int]]:
    """Denoising passes of each canvas: the encoder runs once before a canvas, the decoder once in a pass.

    Hooks and not a streamer, which would have every pass's canvas copied to the host and slow the model down.
    """
    steps: list[int] = []

    def denoise(*_: Any) -> None:
        steps[-1] += 1

    encoder, decoder = model.model.encoder, model.model.decoder
    with (
        encoder.register_forward_pre_hook(lambda *_: steps.append(0)),
        decoder.register_forward_pre_hook(denoise),
    ):
        yield steps
