"""The generation loop: prompts in, events out (a draft per pass, committed text per canvas, then the result)."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from redraft.cache import KVArena, check_context
from redraft.config import TIERS, DecodeSettings, ModelConfig, Tier, WeightFormat, check_choice, check_seed
from redraft.decode.entropy_bound import EntropyBoundDecoder
from redraft.decode.streams import CounterStream, Stream, TorchStream
from redraft.errors import UsageError
from redraft.model import Model
from redraft.weights import nbytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from redraft.checkpoint import Checkpoint

Prompt = str | Sequence[dict[str, str]] | Sequence[int]


@dataclass(frozen=True)
class Draft:
    """One denoising pass of one canvas: the argmax canvas and the positions the decoding rule accepted."""

    canvas: int  # from 0
    step: int  # from 1
    tokens: list[int]
    accepted: list[bool]
    mean_entropy: float  # nats


@dataclass(frozen=True)
class Committed:
    """A finished canvas: its tokens, cut after EOS and at max_new_tokens, and the text it adds."""

    canvas: int
    steps: int
    tokens: list[int]
    text: str


@dataclass(frozen=True)
class Result:
    """One answer and what it cost.

    `token_ids` ends with the EOS token when one was generated. `tokens_per_forward` counts tokens other than padding
    over denoising passes. `seconds` spans the request (of a batch: the whole batch), first encode included.
    `peak_memory_bytes` is the device's allocation peak on a GPU and the process's peak resident size on a CPU.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    forwards: int
    canvases: int
    tokens_per_forward: float
    steps_per_canvas: list[int]
    seconds: float
    tokens_per_second: float
    finish_reason: str  # "stop" (EOS) or "length"
    seed: int
    peak_memory_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


Event = Draft | Committed | Result


@dataclass
class _Request:
    """One row of a running batch."""

    prompt: list[int]
    seed: int
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    emitted: str = ""
    finish_reason: str | None = None


class Engine:
    """A loaded model ready to answer. Create it with `redraft.load`."""

    def __init__(self, checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase, tier: Tier):
        check_choice("tier", tier, TIERS)
        self.config: ModelConfig = checkpoint.config
        self.settings: DecodeSettings = checkpoint.settings
        self.notes: list[str] = checkpoint.notes
        self.model = Model(checkpoint.config, checkpoint.weights)
        self.tokenizer = tokenizer
        self.tier: Tier = tier
        self.weights: WeightFormat = "bf16" if checkpoint.spec is None else "w4"
        self.weight_bytes = nbytes(checkpoint.weights)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: a string as one user turn, messages through the chat template, token ids as they are.

        Raises UsageError when it is empty or holds an id outside the vocabulary.
        """
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UsageError("the prompt is empty")
            prompt = [{"role": "user", "content": prompt}]
        if not prompt:
            raise UsageError("the prompt is empty")
        if isinstance(prompt[0], dict):
            return self._apply_template([dict(m) for m in prompt])  # type: ignore[arg-type]
        return self._check_ids(prompt)  # type: ignore[arg-type]

    def generate(self, prompt: Prompt, *, seed: int = 0, tier: Tier | None = None, **settings: Any) -> Result:
        """Answer one prompt. Settings are the fields of DecodeSettings; unset ones come from the checkpoint."""
        return self.generate_batch([prompt], seed=seed, tier=tier, **settings)[0]

    def generate_batch(
        self, prompts: Sequence[Prompt], *, seed: int | Sequence[int] = 0, tier: Tier | None = None, **settings: Any
    ) -> list[Result]:
        """Answer several prompts in one batch, left-padded to equal length.

        Tier turbo gives prompt i the seed `seed + i` (or seed[i]) and a text that does not depend on the others. Tiers
        off and bitexact draw the whole batch from one torch generator, as transformers does.
        """
        if not prompts:
            raise UsageError("no prompts were given")
        results: list[Result | None] = [None] * len(prompts)
        for row, event in self._run(prompts, seed, tier, settings, drafts=False):
            if isinstance(event, Result):
                results[row] = event
        return [r for r in results if r is not None]

    def stream(self, prompt: Prompt, *, seed: int = 0, tier: Tier | None = None, **settings: Any) -> Iterator[Event]:
        """Answer one prompt, yielding a Draft per pass, a Committed per canvas, and last the Result."""
        for _, event in self._run([prompt], seed, tier, settings, drafts=True):
            yield event

    def _apply_template(self, messages: list[dict[str, str]]) -> list[int]:
        for message in messages:
            if set(message) < {"role", "content"} or not isinstance(message.get("content"), str):
                raise UsageError(f"a message needs the text fields role and content, found {sorted(message)}")
        if not any(m["content"].strip() for m in messages):
            raise UsageError("the prompt is empty")
        if self.tokenizer.chat_template is None:
            raise UsageError("this checkpoint has no chat template; pass token ids instead of text")
        encoded: Any = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return self._check_ids(encoded["input_ids"])

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        for position, token in enumerate(ids):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.config.vocab_size:
                raise UsageError(
                    f"token id {token!r} at position {position} is outside the vocabulary (0 to "
                    f"{self.config.vocab_size - 1})"
                )
        return list(ids)

    def _stream_for(self, tier: Tier, seeds: list[int]) -> Stream:
        length, vocab = self.config.canvas_length, self.config.vocab_size
        if tier == "turbo":
            return CounterStream(seeds, length, vocab, self.device)
        if len(set(seeds)) > 1:
            raise UsageError(f"tier {tier} draws a whole batch from one seed; pass one seed or use tier turbo")
        return TorchStream(seeds[0], len(seeds), length, vocab, self.device)

    def _seeds(self, seed: int | Sequence[int], count: int, tier: Tier) -> list[int]:
        if isinstance(seed, int):
            return [check_seed(seed + i if tier == "turbo" else seed) for i in range(count)]
        if len(seed) != count:
            raise UsageError(f"{len(seed)} seeds were given for {count} prompts")
        return [check_seed(s) for s in seed]

    def _run(
        self,
        prompts: Sequence[Prompt],
        seed: int | Sequence[int],
        tier: Tier | None,
        changes: dict[str, Any],
        drafts: bool,
    ) -> Iterator[tuple[int, Event]]:
        tier = tier or self.tier
        check_choice("tier", tier, TIERS)
        settings = self.settings.replace(**changes)
        seeds = self._seeds(seed, len(prompts), tier)
        requests = [_Request(self.encode_prompt(p), s) for p, s in zip(prompts, seeds, strict=True)]
        batch = _Batch(self, requests, settings, self._stream_for(tier, seeds))
        yield from batch.run(drafts)


class _Batch:
    """Requests that run together, canvas by canvas, until all have met EOS or their length."""

    def __init__(self, engine: Engine, requests: list[_Request], settings: DecodeSettings, stream: Stream):
        self.engine, self.requests, self.settings, self.stream = engine, requests, settings, stream
        config = engine.config
        self.canvases = -(-settings.max_new_tokens // config.canvas_length)
        self.longest = max(len(r.prompt) for r in requests)
        # A canvas occupies its whole length even when max_new_tokens cuts it.
        check_context(config, self.longest, self.canvases * config.canvas_length)

    def run(self, drafts: bool) -> Iterator[tuple[int, Event]]:
        start = time.perf_counter()
        arena, pending = self._open_arena()
        for index in range(self.canvases):
            self.engine.model.encode(pending, arena)
            decoder = EntropyBoundDecoder(self.settings, self.stream, index)
            active = [r for r, request in enumerate(self.requests) if request.finish_reason is None]
            yield from self._denoise(decoder, arena, active, index, drafts)
            pending = self._commit(decoder.argmax)
            for row in active:
                yield row, self._committed(row, index)
            if all(request.finish_reason for request in self.requests):
                break
        seconds = time.perf_counter() - start
        for row, request in enumerate(self.requests):
            yield row, self._result(request, seconds)

    def _open_arena(self) -> tuple[KVArena, torch.Tensor]:
        """An arena for the whole run, and the prompts int64 [B, longest] padded on the left."""
        engine, pad = self.engine, self.engine.config.pad_token_id
        padding = [self.longest - len(r.prompt) for r in self.requests]
        rows = [[pad] * count + r.prompt for count, r in zip(padding, self.requests, strict=True)]
        capacity = self.longest + (self.canvases - 1) * engine.config.canvas_length
        _reset_peak(engine.device)
        arena = KVArena(
            engine.config,
            len(rows),
            capacity,
            engine.dtype,
            engine.device,
            torch.tensor(padding, device=engine.device),
        )
        return arena, torch.tensor(rows, device=engine.device)

    def _denoise(
        self, decoder: EntropyBoundDecoder, arena: KVArena, active: list[int], index: int, drafts: bool
    ) -> Iterator[tuple[int, Event]]:
        running = set(active)
        for row in active:
            self.requests[row].steps.append(0)
        while not decoder.finished():
            outcome = decoder.step(self.engine.model.denoise(decoder.canvas, arena, decoder.self_conditioning))
            for row in sorted(running):
                self.requests[row].steps[-1] += 1
                if drafts:
                    yield (
                        row,
                        Draft(
                            index,
                            decoder.steps,
                            outcome.argmax[row].tolist(),
                            outcome.accepted[row].tolist(),
                            float(outcome.entropy[row].mean()),
                        ),
                    )
            running -= {row for row, done in enumerate(outcome.done.tolist()) if done}

    def _commit(self, argmax: torch.Tensor) -> torch.Tensor:
        """Take the canvases of unfinished requests; return what to encode next, int64 [B, C], padded after EOS."""
        canvases = argmax.tolist()
        pad = self.engine.config.pad_token_id
        for row, request in enumerate(self.requests):
            kept = [] if request.finish_reason else self._cut(canvases[row], request)
            request.tokens += kept[: self.settings.max_new_tokens - len(request.tokens)]
            canvases[row] = kept + [pad] * (self.engine.config.canvas_length - len(kept))
        return torch.tensor(canvases, device=argmax.device)

    def _cut(self, canvas: list[int], request: _Request) -> list[int]:
        """The canvas up to and including its first EOS; sets the finish reason."""
        room = self.settings.max_new_tokens - len(request.tokens)
        for position, token in enumerate(canvas):
            if token in self.settings.eos_token_ids:
                request.finish_reason = "stop" if position < room else "length"
                return canvas[: position + 1]
        if room <= len(canvas):
            request.finish_reason = "length"
        return canvas

    def _committed(self, row: int, index: int) -> Committed:
        request = self.requests[row]
        text = self.engine.decode(request.tokens)
        if request.finish_reason is None:
            text = text.rstrip("\ufffd")  # an unfinished character waits for the next canvas
        new, request.emitted = text[len(request.emitted) :], text
        first = index * self.engine.config.canvas_length
        return Committed(index, request.steps[-1], request.tokens[first:], new)

    def _result(self, request: _Request, seconds: float) -> Result:
        forwards = sum(request.steps)
        counted = sum(token != self.engine.config.pad_token_id for token in request.tokens)
        return Result(
            text=self.engine.decode(request.tokens),
            token_ids=request.tokens,
            prompt_tokens=len(request.prompt),
            forwards=forwards,
            canvases=len(request.steps),
            tokens_per_forward=counted / forwards,
            steps_per_canvas=request.steps,
            seconds=seconds,
            tokens_per_second=len(request.tokens) / seconds,
            finish_reason=request.finish_reason or "length",
            seed=request.seed,
            peak_memory_bytes=_peak_memory(self.engine.device),
        )


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
