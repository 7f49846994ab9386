"""The harness: arms answer questions in turn, and every answer is graded and timed.

An evaluation is a comparison with one arm. Arms that are in memory together take turns: the first question goes to A
then B, the next to B then A, so that a clock that drifts, or a machine that warms up, is no one's advantage. Every
answer starts from the seed of its question.
"""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import torch

from redraft.device import peak_bytes, reset_peak, synchronize
from redraft.engine.engine import Engine
from redraft.engine.events import Result
from redraft.evaluate.base import Question

T = TypeVar("T")

# Fields that a record takes from a result as they are.
TAKEN = ("forwards", "tokens_per_forward", "steps_per_canvas", "finish_reason", "seed", "prompt_tokens", "canvases")


@dataclass(frozen=True)
class Record:
    """One graded answer of one arm.

    `seconds` is the answer's share of its batch's wall time, so that a sum is the time spent. `answer_seconds` is what
    it took from request to end: in an evaluation by the engine's clock, in a batch as long as the batch.
    """

    id: str
    task: str
    prompt: str
    answer: str
    expected: str
    correct: bool
    tokens: int  # padding inside an answer is no token, here and in tokens_per_forward
    forwards: int
    tokens_per_forward: float
    steps_per_canvas: list[int]
    finish_reason: str
    seconds: float
    answer_seconds: float
    seed: int
    # Of a comparison only; the one arm of an evaluation has no name.
    arm: str = ""
    turn: int = 0  # the how-manieth arm to answer this question
    prompt_tokens: int = 0
    canvases: int = 0
    weight_bytes: int = 0
    peak_bytes: int = 0  # on a GPU of this arm alone, weights included; on a CPU of the process so far

    def to_dict(self) -> dict[str, Any]:
        """The fields of a line in a file; those of an arm only where it has a name."""
        kept = (f.name for f in dataclasses.fields(self) if self.arm or f.default is dataclasses.MISSING)
        return {name: getattr(self, name) for name in kept}


@dataclass(frozen=True)
class Side:
    """An arm that is in memory: `generate_batch(prompts, seed=seeds, **settings)`, as the engine has it.

    weight_bytes: tensors shared with other arms too. kept_bytes: what stays allocated beside them once it has answered,
    such as an arena and captured graphs. about: what runs its parts.
    """

    name: str
    generate_batch: Callable[..., list[Result]]
    device: torch.device
    settings: Mapping[str, Any] = field(default_factory=dict)
    weight_bytes: int = 0
    kept_bytes: int = 0
    about: Mapping[str, str] = field(default_factory=dict)

    def generate(self, questions: Sequence[Question], **changes: Any) -> list[Result]:
        prompts, seeds = [q.item.prompt for q in questions], [q.seed for q in questions]
        return self.generate_batch(prompts, seed=seeds, **{**self.settings, **changes})

    def answer(self, questions: Sequence[Question], turn: int) -> Iterator[Record]:
        """A record of each question, all of them asked in one batch."""
        reset_peak(self.device)
        before = allocated(self.device)
        synchronize(self.device)
        began = time.perf_counter()
        results = self.generate(questions)
        synchronize(self.device)
        seconds, peak = (time.perf_counter() - began) / len(questions), peak_bytes(self.device)
        if self.device.type == "cuda":  # other arms' weights are no part of this one's peak
            peak += self.weight_bytes + self.kept_bytes - before
        endless = self.settings.get("eos_token_ids") == ()  # then all is noise, padding too
        for question, result in zip(questions, results, strict=True):
            task, item = question.task, question.item
            yield Record(
                id=item.id, task=task.name, prompt=item.prompt, answer=result.text, expected=item.expected,
                correct=task.grade(item, result.text, ended=result.finish_reason == "stop"),
                tokens=len(result.token_ids) if endless else result.tokens,
                seconds=seconds, answer_seconds=seconds if self.name else result.seconds,
                arm=self.name, turn=turn, weight_bytes=self.weight_bytes, peak_bytes=peak,
                **{name: getattr(result, name) for name in TAKEN},
            )  # fmt: skip


def allocated(device: torch.device) -> int:
    """Bytes that torch holds on a GPU; 0 elsewhere."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def turns(arms: Sequence[T], index: int) -> list[T]:
    """The order in which arms answer question `index`: A B C, then C B A, so that all have the same mean place."""
    return list(arms) if index % 2 == 0 else list(reversed(arms))


def answers(
    sides: Sequence[Side], questions: Sequence[Question], done: Collection[tuple[str, str]], batch_size: int = 1
) -> Iterator[Record]:
    """Answer every question by every arm but for the (arm name, item id) in `done`.

    A batch holds questions of one task. Arms take turns from batch to batch.
    """
    missing = {(side.name, q.item.id) for side in sides for q in questions} - set(done)
    left = [(i, q) for i, q in enumerate(questions) if any((side.name, q.item.id) in missing for side in sides)]
    for _, of_task in groupby(left, key=lambda each: each[1].task.name):
        rest = list(of_task)
        while rest:
            batch, rest = rest[:batch_size], rest[batch_size:]
            for turn, side in enumerate(turns(sides, batch[0][0])):
                if asked := [q for _, q in batch if (side.name, q.item.id) in missing]:
                    yield from side.answer(asked, turn)


def evaluate(
    engine: Engine, questions: Sequence[Question], *, batch_size: int = 1, settings: Mapping[str, Any] | None = None,
    done: Collection[tuple[str, str]] = (),
) -> Iterator[Record]:  # fmt: skip
    """The answers of one engine, an arm without a name, to the questions that are not in `done`."""
    return answers([Side("", engine.generate_batch, engine.device, settings or {})], questions, done, batch_size)
