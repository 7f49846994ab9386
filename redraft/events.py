"""What a generation tells: a draft per denoising pass, committed text per canvas, and the result."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


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

    `token_ids` ends with the EOS token when one was generated. `tokens_per_forward` (denoising passes) and
    `tokens_per_second` count tokens other than padding, as `tokens` does. `seconds` spans the request (of a batch: the
    whole batch), first encode included. `peak_memory_bytes` is the device's allocation peak on a GPU and the process's
    peak resident size on a CPU.
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

    @property
    def tokens(self) -> int:
        return round(self.tokens_per_forward * self.forwards)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


Event = Draft | Committed | Result
