"""An engine without a network: one token per character, scripted drafts, an answer that repeats the question."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from redraft.config import DecodeSettings, check_seed
from redraft.engine.engine import Prompt
from redraft.engine.events import Committed, Draft, Event, Result
from redraft.errors import UsageError

EOS = 1
CANVAS = 16
CONTEXT = 200  # characters of all messages together


class FakeEngine:
    """Answers "You said: <last message>", or raises `failure` where it is set."""

    def __init__(self, failure: BaseException | None = None, weights: str = "w4", tier: str = "turbo") -> None:
        self.failure, self.weights, self.tier = failure, weights, tier
        self.settings, self.weight_bytes = DecodeSettings(), 1_500_000
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.prompts: list[Prompt] = []
        self.notes: list[str] = []
        self.batches: list[int] = []

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(t) for t in token_ids if t > EOS)

    def answer_to(self, prompt: Prompt) -> str:
        return f"You said: {prompt if isinstance(prompt, str) else prompt[-1]['content']}"

    def generate(self, prompt: Prompt, *, seed: int = 0, **settings: Any) -> Result:
        *_, result = self.stream(prompt, seed=seed, **settings)
        return result

    def generate_batch(self, prompts: Sequence[Prompt], *, seed: Sequence[int], **settings: Any) -> list[Result]:
        self.batches.append(len(prompts))
        return [self.generate(p, seed=s, **settings) for p, s in zip(prompts, seed, strict=True)]

    def stream(self, prompt: Prompt, *, seed: int = 0, **settings: Any) -> Iterator[Event]:
        limit = self.settings.replace(**settings).max_new_tokens
        check_seed(seed)
        text = prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)
        if not text.strip():
            raise UsageError("the prompt is empty")
        if len(text) > CONTEXT:
            raise UsageError(f"the prompt exceeds the context of {CONTEXT}")
        self.prompts.append(prompt)
        start = time.perf_counter()
        if self.failure is not None:
            raise self.failure
        tokens = [*map(ord, self.answer_to(prompt)), EOS]
        finish = "stop" if len(tokens) <= limit else "length"
        tokens = tokens[:limit]
        canvases = [tokens[i : i + CANVAS] for i in range(0, len(tokens), CANVAS)]
        for index, canvas in enumerate(canvases):
            yield Draft(index, 1, [ord("?")] * len(canvas), [False] * len(canvas), 2.0)
            yield Draft(index, 2, canvas, [True] * len(canvas), 0.0)
            yield Committed(index, 2, canvas, text=self.decode(canvas))
        seconds = 0.5 + time.perf_counter() - start
        yield Result(
            token_ids=tokens, tokens=len(tokens), prompt_tokens=7, steps_per_canvas=[2] * len(canvases),
            seconds=seconds, finish_reason=finish, seed=seed, peak_memory_bytes=1000, text=self.decode(tokens),
        )  # fmt: skip
