"""What a generation tells: a draft per denoising pass, committed text per canvas, and the result.

Cutting an answer at its end token and counting its tokens are here and nowhere else.
"""

import dataclasses
from collections.abc import Collection, Sequence
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
    finish_reason: str | None = None  # as in Result, of the last canvas
    text: str = ""


@dataclass(frozen=True)
class Result:
    """One answer and what it cost.

    `token_ids` ends with the EOS token when one was generated; `tokens` counts those that are no padding, and so do the
    ratios. `cached_tokens` of the prompt were in memory from an earlier request. `seconds` is the request's own time,
    from its first encode (waiting for a slot left out) to its last canvas. `peak_memory_bytes` is the device's
    allocation peak on a GPU and the process's peak resident size on a CPU.
    """

    token_ids: list[int]
    tokens: int
    prompt_tokens: int
    steps_per_canvas: list[int]
    seconds: float
    finish_reason: str  # "stop" (EOS) or "length"
    seed: int
    peak_memory_bytes: int
    cached_tokens: int = 0
    text: str = ""

    @property
    def forwards(self) -> int:
        """Denoising passes."""
        return sum(self.steps_per_canvas)

    @property
    def canvases(self) -> int:
        return len(self.steps_per_canvas)

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """All fields, and the figures that follow from them."""
        figures = ("forwards", "canvases", "tokens_per_forward", "tokens_per_second")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in figures}


Event = Draft | Committed | Result


def cut(tokens: Sequence[int], end_tokens: Collection[int], room: int) -> tuple[list[int], str | None]:
    """The tokens up to their first end token or to `room` of them, and why: "stop", "length", or None for neither."""
    for position, token in enumerate(tokens[:room]):
        if token in end_tokens:
            return list(tokens[: position + 1]), "stop"
    return list(tokens[:room]), "length" if room <= len(tokens) else None


def count_tokens(tokens: Sequence[int], pad: int) -> int:
    """Tokens that are no padding."""
    return sum(token != pad for token in tokens)
