"""`model.generate` on Redraft's loop, in tier `turbo`.

What the loop does not know runs as transformers does, on the packed experts; a warning says why, once a reason.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationOutput,
    EntropyBoundSamplerConfig,
)

from redraft.config import DecodeSettings
from redraft.decode.entropy_bound import ENTROPY_BOUND
from redraft.engine.events import Committed, Draft, Event
from redraft.engine.loop import Request
from redraft.engine.tickets import Desk, Ticket
from redraft.errors import MemoryShortage, UsageError
from redraft.hf.cache import TokenCache
from redraft.hf.network import OwnLoop

_SIGNATURE = inspect.signature(DiffusionGemmaForBlockDiffusion.generate)
_CACHE = "cache" if "cache" in _SIGNATURE.parameters else "past_key_values"  # its name in this transformers
_KNOWN = {"self", "input_ids", "streamer", "generation_config", "kwargs", _CACHE}


@torch.inference_mode(False)  # what it leaves for the next call must be writable there
@torch.no_grad()
def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of `DiffusionGemmaForBlockDiffusion.generate`: the same arguments, the same kinds of results.

    Seeds come from torch's generator, one a row, so that a torch seed makes a call repeatable.
    """
    own: OwnLoop = model._redraft_loop
    with torch.cuda.device_of(model.lm_head.weight):
        try:
            call = Call(model, args, kwargs)
            tickets = call.submit(own.desk(model))
        except (UsageError, MemoryShortage) as reason:
            if str(reason) not in own.said:
                own.said.add(str(reason))
                warnings.warn(f"generate runs as transformers does, not on Redraft's loop: {reason}", stacklevel=4)
            return type(model).generate(model, *args, **kwargs)
        return call.answer(tickets)


def _refuse(unknown: Any, what: str) -> None:
    if unknown:
        raise UsageError(what)


class Call:
    """The arguments of one call of `generate`, as transformers reads them.

    Raises UsageError with what of them the loop does not know.
    """

    ids: Any
    streamer: Any

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.model, self.length = model, model.config.canvas_length
        arguments = _SIGNATURE.bind(model, *args, **kwargs).arguments
        options = dict(arguments.get("kwargs", {}))
        older = options.pop("past_key_values", None)
        self.ids, self.cache = arguments.get("input_ids"), arguments.get(_CACHE, older)
        self.streamer = arguments.get("streamer")
        self.config, rest = model._prepare_generation_config(arguments.get("generation_config"), **options)
        mask, types = rest.pop("attention_mask", None), rest.pop("mm_token_type_ids", None)
        unknown = {name for name, value in arguments.items() if name not in _KNOWN and value}
        unknown |= {name for name, value in rest.items() if value is not None}
        _refuse(unknown, f"{', '.join(sorted(unknown))} given")
        _refuse(types is not None and types.any(), "mm_token_type_ids name images")
        _refuse(getattr(self.streamer, "_takes_logits", False), "the streamer takes logits")
        self.tokens, self.keep = self._prompts(mask)
        self.settings = self._settings()

    def _prompts(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """All that is read before the first canvas, int64 [B, N], and what of it is no padding, bool [B, N]."""
        tokens, cache = self.ids, self.cache
        _refuse(tokens is None or tokens.ndim != 2 or not tokens.numel(), "input_ids are no prompts [B, N]")
        _refuse(self.config.pad_token_id is None and len(tokens) > 1, "a batch without pad_token_id")
        if cache is not None:
            ours = isinstance(cache, TokenCache) and cache.tokens is not None and cache.model() is self.model
            _refuse(not ours, "a cache that this model's generate did not return, or that was looked into")
            _refuse(len(cache.tokens) != len(tokens), "a cache of another batch")
            tokens = torch.cat((cache.tokens, tokens), dim=1)
        keep = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        padded = keep.shape == tokens.shape and keep[:, -1].all() and not (keep[:, 1:] < keep[:, :-1]).any()
        _refuse(not padded, "an attention_mask of more than padding on the left")
        _refuse((tokens == self.model.config.image_token_id).any(), "image tokens")
        outside = (tokens < 0) | (tokens >= self.model.config.text_config.vocab_size)
        _refuse(outside.any(), "token ids outside the vocabulary")
        return tokens, keep

    def _settings(self) -> DecodeSettings:
        config, sampler = self.config, self.config.sampler_config
        _refuse(type(sampler) is not EntropyBoundSamplerConfig, f"the sampler is a {type(sampler).__name__}")
        place = config.cache_implementation or ""
        unlike = place == "quantized" or "offloaded" in place or (place and self.cache is not None)
        _refuse(unlike, f"cache_implementation {place!r}")
        _, new = self.model._prepare_generated_length(config, self.tokens.shape[1])
        canvases = math.ceil(new / self.length)
        if config.max_length is not None:
            canvases = min(canvases, max(1, math.ceil((config.max_length - self.ids.shape[1]) / self.length)))
        eos, steps = config.eos_token_id, config.max_denoising_steps
        flat = config.t_min is None or config.t_max is None
        endless = config.stability_threshold is None or config.confidence_threshold is None
        return DecodeSettings(
            max_new_tokens=canvases * self.length,  # transformers returns all of the last canvas, too
            max_denoising_steps=steps,
            entropy_bound=sampler.entropy_bound,
            t_min=1.0 if flat else config.t_min,
            t_max=1.0 if flat else config.t_max,
            # As many equal canvases as there are passes: none ends before its last pass.
            stability_threshold=steps if endless else config.stability_threshold,
            confidence_threshold=1.0 if endless else config.confidence_threshold,
            eos_token_ids=() if eos is None else eos,
        )

    def submit(self, desk: Desk) -> list[Ticket]:
        """Put the rows in line, each with a seed of its own."""
        if self.cache is None:
            desk.forget()  # weights may have changed in place since
        cuda, index = self.ids.is_cuda, self.ids.device.index
        generator = torch.cuda.default_generators[index] if cuda else torch.default_generator
        state = generator.get_state()
        seeds, prompts = draw_seeds(len(self.ids), generator), zip(self.tokens, self.keep, strict=True)
        drafts = hasattr(self.streamer, "put_draft") or self.config.pad_token_id is None
        try:
            return desk.submit(
                [
                    Request(tokens[keep].tolist(), ENTROPY_BOUND, self.settings, seed, drafts)
                    for (tokens, keep), seed in zip(prompts, seeds, strict=True)
                ]
            )
        except BaseException:
            generator.set_state(state)
            raise

    def answer(self, tickets: list[Ticket]) -> Any:
        """Take all canvases, tell the streamer, and return what transformers does."""
        try:
            return self._answer([Row(ticket, self.length, self.config.pad_token_id) for ticket in tickets])
        finally:
            for ticket in tickets:
                ticket.cancel()

    def _answer(self, rows: list[Row]) -> Any:
        streamer, sequences = self.streamer, [self.ids]
        if streamer is not None:
            streamer.put(self.ids.cpu())
        while not all(row.over for row in rows):
            canvas = self._canvas(rows)
            sequences.append(canvas.to(self.ids.device))
            if streamer is not None:
                streamer.put(canvas)
        if streamer is not None:
            streamer.end()
        whole = torch.cat(sequences, dim=1)
        if not getattr(self.config, "return_dict_in_generate", True):
            return whole
        new, pad = whole[:, self.ids.shape[1] :], self.config.pad_token_id
        passes = torch.tensor([row.passes for row in rows], device=whole.device)
        rate = (new.shape[1] if pad is None else (new != pad).sum(dim=-1)) / passes
        fields: dict[str, Any] = {_CACHE: self._committed(new[:, : -self.length])}
        return DiffusionGemmaGenerationOutput(sequences=whole, tokens_per_forward=rate, **fields)  # type: ignore[arg-type]

    def _canvas(self, rows: list[Row]) -> torch.Tensor:
        """One canvas of every row, int64 [B, C] on the CPU, its passes shown side by side."""
        put_draft = getattr(self.streamer, "put_draft", None)
        running = [row for row in rows if row.begin()]
        while running := [row for row in running if row.draft()]:
            if put_draft is not None:
                put_draft(value=torch.tensor([row.shown for row in rows]))
        return torch.tensor([row.canvas for row in rows])

    def _committed(self, new: torch.Tensor) -> TokenCache:
        """A cache of what the loop has read: all but the last canvas."""
        tokens = torch.cat((self.tokens, new), dim=1)
        keep = torch.cat((self.keep, torch.ones_like(new, dtype=torch.bool)), dim=1)
        if self.cache is None:
            return TokenCache(self.model, tokens, keep)
        self.cache.tokens, self.cache.mask = tokens, keep
        return self.cache


class Row:
    """One row of a batch, canvas by canvas: it may be passes ahead of the others, and is shown in step with them."""

    def __init__(self, ticket: Ticket, length: int, pad: int | None):
        self._events: Iterator[Event] = iter(ticket)
        self._length, self._pad = length, pad
        self.shown: list[int] = []  # the last draft
        self.canvas: list[int] = []  # what is committed, whole
        self.over, self.passes = False, 0

    def begin(self) -> bool:
        """Start a canvas; False for a row that has ended, which is padded from then on."""
        if self.over:
            self.shown = self.canvas = [self._pad or 0] * self._length
        return not self.over

    def draft(self) -> bool:
        """Take the next pass into `shown`; or False, and what is committed is in `canvas`."""
        event = next(self._events)
        if isinstance(event, Draft):
            self.shown = event.tokens
            return True
        assert isinstance(event, Committed), "a canvas ends before the answer does"
        self.canvas = self.shown
        if self._pad is not None:
            self.canvas = event.tokens + [self._pad] * (self._length - len(event.tokens))
        self.passes += event.steps
        self.over = event.finish_reason is not None
        return False


def draw_seeds(count: int, generator: torch.Generator) -> list[int]:
    """Whole numbers from 0 to 2^63 - 1."""
    seeds = torch.empty(count, dtype=torch.int64, device=generator.device)
    return [int(seed) for seed in seeds.random_(generator=generator).tolist()]
