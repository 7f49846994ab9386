"""Requests that are answered together, canvas by canvas, until all have met an end token or their length."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from redraft.config import DecodeSettings, ModelConfig
from redraft.decode.entropy_bound import EntropyBoundDecoder, Pass
from redraft.decode.streams import Stream
from redraft.engine.events import Committed, Draft, Event, Result, count_tokens
from redraft.engine.graphs import SlotRunner, SlotStatus
from redraft.network.arena import KVArena
from redraft.network.model import Model

Decode = Callable[[list[int]], str]


@dataclass
class Request:
    """One row of a running batch."""

    prompt: list[int]
    seed: int
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    emitted: str = ""
    finish_reason: str | None = None


class Batch:
    """The part of the loop that does not depend on what runs the passes: cutting, counting and reporting."""

    def __init__(self, config: ModelConfig, decode: Decode, requests: list[Request], settings: DecodeSettings):
        self.config, self.decode, self.requests, self.settings = config, decode, requests, settings
        self.max_canvases = -(-settings.max_new_tokens // config.canvas_length)
        self.longest = max(len(r.prompt) for r in requests)

    def run(self, device: torch.device, drafts: bool) -> Iterator[tuple[int, Event]]:
        """(row, event) until every request has its Result; drafts only when asked for."""
        start = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        yield from self._canvases(drafts)
        seconds = time.perf_counter() - start
        for row, request in enumerate(self.requests):
            yield row, self._result(request, seconds, _peak_memory(device))

    def _canvases(self, drafts: bool) -> Iterator[tuple[int, Event]]:
        raise NotImplementedError

    def _take(self, row: int, canvas: list[int]) -> list[int]:
        """Add a finished canvas to its request; returns what to encode, padded after the end token."""
        request = self.requests[row]
        kept = self._cut(canvas, request)
        request.tokens += kept[: self.settings.max_new_tokens - len(request.tokens)]
        return self._padded(kept)

    def _padded(self, tokens: list[int]) -> list[int]:
        return tokens + [self.config.pad_token_id] * (self.config.canvas_length - len(tokens))

    def _cut(self, canvas: list[int], request: Request) -> list[int]:
        """The canvas up to and including its first end token; sets the finish reason."""
        room = self.settings.max_new_tokens - len(request.tokens)
        for position, token in enumerate(canvas):
            if token in self.settings.eos_token_ids:
                request.finish_reason = "stop" if position < room else "length"
                return canvas[: position + 1]
        if room <= len(canvas):
            request.finish_reason = "length"
        return canvas

    def _committed(self, row: int) -> Committed:
        request, index = self.requests[row], len(self.requests[row].steps) - 1
        text = self.decode(request.tokens)
        if request.finish_reason is None:
            text = text.rstrip("\ufffd")  # an unfinished character waits for the next canvas
        new, request.emitted = text[len(request.emitted) :], text
        first = index * self.config.canvas_length
        return Committed(index, request.steps[-1], request.tokens[first:], new)

    def _result(self, request: Request, seconds: float, peak: int) -> Result:
        return Result(
            token_ids=request.tokens,
            tokens=count_tokens(request.tokens, self.config.pad_token_id),
            prompt_tokens=len(request.prompt),
            steps_per_canvas=request.steps,
            seconds=seconds,
            finish_reason=request.finish_reason or "length",
            seed=request.seed,
            peak_memory_bytes=peak,
            text=self.decode(request.tokens),
        )


class ReferenceBatch(Batch):
    """On the reference network: prompts padded on the left, all rows at the same canvas and pass."""

    def __init__(self, model: Model, stream: Stream, decode: Decode, requests: list[Request], settings: DecodeSettings):
        super().__init__(model.config, decode, requests, settings)
        self.model, self.stream = model, stream

    def _canvases(self, drafts: bool) -> Iterator[tuple[int, Event]]:
        arena, pending = self._open_arena()
        for index in range(self.max_canvases):
            self.model.encode(pending, arena)
            decoder = EntropyBoundDecoder(self.settings, self.stream, index)
            active = [row for row, request in enumerate(self.requests) if request.finish_reason is None]
            yield from self._denoise(decoder, arena, active, drafts)
            canvases = decoder.argmax.tolist()
            taken = [
                self._take(row, canvas) if row in active else self._padded([]) for row, canvas in enumerate(canvases)
            ]
            pending = torch.tensor(taken, device=self.model.device)
            for row in active:
                yield row, self._committed(row)
            if all(request.finish_reason for request in self.requests):
                return

    def _open_arena(self) -> tuple[KVArena, torch.Tensor]:
        """An arena for the whole run, and the prompts int64 [B, longest] padded on the left."""
        model, pad = self.model, self.config.pad_token_id
        padding = [self.longest - len(r.prompt) for r in self.requests]
        rows = [[pad] * count + r.prompt for count, r in zip(padding, self.requests, strict=True)]
        capacity = self.longest + (self.max_canvases - 1) * self.config.canvas_length
        left = torch.tensor(padding, device=model.device)
        arena = KVArena(self.config, len(rows), capacity, model.dtype, model.device, left)
        return arena, torch.tensor(rows, device=model.device)

    def _denoise(
        self, decoder: EntropyBoundDecoder, arena: KVArena, active: list[int], drafts: bool
    ) -> Iterator[tuple[int, Event]]:
        running = set(active)
        for row in active:
            self.requests[row].steps.append(0)
        while not decoder.finished():
            outcome = decoder.step(self.model.denoise(decoder.canvas, arena, decoder.self_conditioning))
            for row in sorted(running):
                self.requests[row].steps[-1] += 1
                if drafts:
                    yield row, self._draft(row, outcome)
            running -= {row for row, done in enumerate(outcome.done.tolist()) if done}

    def _draft(self, row: int, outcome: Pass) -> Draft:
        steps = self.requests[row].steps
        return Draft(
            canvas=len(steps) - 1,
            step=steps[-1],
            tokens=outcome.argmax[row].tolist(),
            accepted=outcome.accepted[row].tolist(),
            mean_entropy=float(outcome.entropy[row].mean()),
        )


class SlotBatch(Batch):
    """On fused passes: every request in a slot of its own, at its own length, canvas and pass."""

    def __init__(self, runner: SlotRunner, decode: Decode, requests: list[Request], settings: DecodeSettings):
        super().__init__(runner.config, decode, requests, settings)
        self.runner = runner

    def _canvases(self, drafts: bool) -> Iterator[tuple[int, Event]]:
        runner = self.runner
        runner.reset()
        for row, request in enumerate(self.requests):
            runner.admit(row, request.prompt, self.settings, request.seed)
            request.steps.append(0)
        while any(request.finish_reason is None for request in self.requests):
            runner.run_pass()
            for status in runner.poll() or []:
                yield from self._after_pass(status, drafts)
        while runner.poll(drain=True) is not None:
            pass  # passes that were on their way when the last canvas was found done

    def _after_pass(self, status: SlotStatus, drafts: bool) -> Iterator[tuple[int, Event]]:
        row = status.slot
        if row >= len(self.requests) or self.requests[row].finish_reason is not None:
            return
        request = self.requests[row]
        if status.canvas != len(request.steps) - 1 or status.step == request.steps[-1]:
            return  # a pass that was on its way when the canvas was already done
        request.steps[-1] = status.step
        if drafts:
            yield row, Draft(len(request.steps) - 1, status.step, status.argmax, status.accepted, status.mean_entropy)
        if status.done:
            tokens = self._take(row, status.argmax)
            yield row, self._committed(row)
            if request.finish_reason is None:
                self.runner.commit(row, tokens)
                self.runner.start(row)
                request.steps.append(0)


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
