"""The run of a comparison: whose turn it is, what an answer cost, and a folder in which it survives a kill.

Arms that are in memory together take turns: the first question goes to A then B, the next to B then A, so that a clock
that drifts, or a machine that warms up, is no one's advantage. Every answer starts from the seed of its question.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from redraft.config import DecodeSettings, read_json
from redraft.device import peak_bytes, reset_peak, synchronize
from redraft.errors import UsageError
from redraft.evaluate.arms import Arm
from redraft.evaluate.models import Models, Opened
from redraft.evaluate.run import Record, ResultsFile, graded, item_seed, read_results, run_id
from redraft.evaluate.tasks import Item, Task
from redraft.files import write_text

WARM_UP_STARTS, WARM_UP_PASSES = 16, 2  # questions that an arm begins to answer before the clock starts, and how far


@dataclass(frozen=True)
class Question:
    """One item of one task with the seed that every arm starts from."""

    task: Task
    item: Item
    seed: int


@dataclass(frozen=True)
class AbRecord(Record):
    """One answer of one arm.

    `tokens` leaves padding out. `seconds` and `answer_seconds` are the same: answers are given one at a time.
    """

    arm: str
    turn: int  # the how-manieth arm to answer this question, from 0
    prompt_tokens: int
    canvases: int
    weight_bytes: int
    peak_bytes: int  # on a GPU of this arm alone, weights included; on a CPU of the process so far


def ask(tasks: Sequence[Task], limit: int, seed: int) -> list[Question]:
    """The first `limit` questions of every task, with the seeds that `redraft eval` gives them."""
    return [
        Question(task, item, item_seed(seed, index)) for task in tasks for index, item in enumerate(task.items(limit))
    ]


def turns(arms: Sequence[Arm], index: int) -> list[Arm]:
    """The order in which arms answer question `index`: A B C, then C B A, so that all have the same mean place."""
    return list(arms) if index % 2 == 0 else list(reversed(arms))


def groups(arms: Sequence[Arm], together: bool) -> list[list[Arm]]:
    """Arms that take turns: all of them, or one group per set of weights, BF16 before the W4 that is made of it."""
    if together:
        return [list(arms)]
    holders = sorted({arm.holder for arm in arms}, key=lambda h: (h[0], h[1] == "engine", h[2] == "w4"))
    return [[arm for arm in arms if arm.holder == holder] for holder in holders]


def answer_all(
    models: Models,
    grouped: Sequence[Sequence[Arm]],
    questions: Sequence[Question],
    settings: Mapping[str, DecodeSettings],
    done: set[tuple[str, str]],
    opened: Callable[[Arm, Opened], None],
) -> Iterator[AbRecord]:
    """Answer every question by every arm but for the (arm name, item id) in `done`.

    settings: complete, by arm name. opened(arm, how) is called when an arm is ready. A group in which nothing is left
    to do is not loaded.
    """
    for number, group in enumerate(grouped):
        open_questions = {q.item.id for q in questions if any((arm.name, q.item.id) not in done for arm in group)}
        if open_questions:
            yield from _Round(models, group, settings, opened, questions).answers(done)
        models.close([arm for following in grouped[number + 1 :] for arm in following])


class _Round:
    """Arms that are loaded together, warmed up."""

    def __init__(
        self,
        models: Models,
        arms: Sequence[Arm],
        settings: Mapping[str, DecodeSettings],
        opened: Callable[[Arm, Opened], None],
        questions: Sequence[Question],
    ):
        self.device, self.arms, self.settings, self.questions = models.device, arms, settings, questions
        # BF16 first: the W4 model is made of it.
        self.opened = {arm.name: models.open(arm) for arm in sorted(arms, key=lambda arm: arm.weights == "w4")}
        # What a loaded model keeps beside its weights once it has answered: an arena, captured graphs.
        self.kept: dict[Any, int] = {}
        for arm in arms:
            before = _allocated(self.device)
            self._warm_up(arm)
            place = (arm.holder, arm.tier)
            self.kept[place] = self.kept.get(place, 0) + max(0, _allocated(self.device) - before)
            opened(arm, self.opened[arm.name])

    def _warm_up(self, arm: Arm) -> None:
        """One whole answer, to the longest question, so that every buffer is as large as it gets; then only the start
        of an answer to some more, because kernels are compiled for the lengths of prompts as they come.
        """
        self._generate(arm, max(self.questions, key=lambda question: len(question.item.prompt)))
        for question in self.questions[:WARM_UP_STARTS]:
            self._generate(arm, question, max_new_tokens=1, max_denoising_steps=WARM_UP_PASSES)

    def answers(self, done: set[tuple[str, str]]) -> Iterator[AbRecord]:
        for index, question in enumerate(self.questions):
            for turn, arm in enumerate(turns(self.arms, index)):
                if (arm.name, question.item.id) not in done:
                    yield self._answer(arm, question, turn)

    def _answer(self, arm: Arm, question: Question, turn: int) -> AbRecord:
        reset_peak(self.device)
        before = _allocated(self.device)
        synchronize(self.device)
        began = time.perf_counter()
        result = self._generate(arm, question)
        synchronize(self.device)
        seconds = time.perf_counter() - began
        weights, peak = self.opened[arm.name].weight_bytes, peak_bytes(self.device)
        if self.device.type == "cuda":  # other arms' weights are no part of this one's peak
            peak = weights + self.kept[arm.holder, arm.tier] + peak - before
        graded_fields = graded(question.task, question.item, result)
        if not self.settings[arm.name].eos_token_ids:  # all is noise, padding too
            graded_fields["tokens"] = len(result.token_ids)
        return AbRecord(
            **graded_fields,
            seconds=seconds,
            answer_seconds=seconds,
            arm=arm.name,
            turn=turn,
            prompt_tokens=result.prompt_tokens,
            canvases=result.canvases,
            weight_bytes=weights,
            peak_bytes=peak,
        )

    def _generate(self, arm: Arm, question: Question, **changes: Any) -> Any:
        values = vars(self.settings[arm.name]) | changes
        return self.opened[arm.name].generate(question.item.prompt, seed=question.seed, **values)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


class Folder:
    """Where a comparison lives: run.json says what it is, items.jsonl holds an answer a line.

    identity: everything that decides the results. A folder of the same identity is taken up where it was left. Raises
    UsageError that names what differs when it holds another comparison.
    """

    def __init__(self, path: Path, identity: dict[str, Any]):
        self.path = path
        self.run = run_id(identity)
        self.items = path / "items.jsonl"
        self._about = path / "run.json"
        identity = json.loads(json.dumps(identity, default=str))
        self.facts: dict[str, Any] = {}
        if self._about.exists():
            self._check(read_json(self._about), identity)
        elif path.exists() and any(path.iterdir()):
            raise UsageError(f"{path} holds other files; give --out another directory")
        self._identity = identity

    def _check(self, found: dict[str, Any], identity: dict[str, Any]) -> None:
        there, here = _flat(found.get("identity")), _flat(identity)
        changed = [key for key in (*there, *here) if there.get(key) != here.get(key)]
        if changed:
            key = changed[0]
            raise UsageError(
                f"{self.path} holds another comparison: {key} is {there.get(key)} there and {here.get(key)} now; "
                "give --out another directory, or remove this one"
            )
        self.facts = found.get("facts", {})

    def note(self, **facts: Any) -> None:
        """Keep facts about the run for its report, such as the machine's limits."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.facts |= facts
        write_text(self._about, json.dumps({"identity": self._identity, "facts": self.facts}, indent=2) + "\n")

    def finished(self) -> list[AbRecord] | None:
        """All answers of a comparison that is complete, None of another."""
        return read_results(self.items, self.run, AbRecord) if self.items.exists() else None

    def results_file(self) -> ResultsFile[AbRecord]:
        """The file of answers, with those of an interrupted run in `done`."""
        return ResultsFile(self.items, self.run, AbRecord)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested dicts as one with dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for key, each in value.items() for k, v in _flat(each, f"{name}.{key}" if name else key).items()}


def fingerprint(questions: Sequence[Question]) -> str:
    """A short name of what is asked and expected."""
    text = json.dumps([[q.item.id, q.item.prompt, q.item.expected, q.seed] for q in questions])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def arm_settings(
    arm: Arm, base: DecodeSettings, shared: dict[str, Any], fixed_steps: int | None, endless: bool
) -> DecodeSettings:
    """The complete settings of an arm: the checkpoint's, those for all arms, its own, and what fixes the passes.

    fixed_steps: a canvas takes exactly so many passes, because as many equal canvases as would end it earlier never
    come together. endless: no end tokens, for random weights, whose answers then all have the same length.
    """
    chosen = base.replace(**{**shared, **arm.settings})
    if fixed_steps is not None:
        taken = {"max_denoising_steps", "stability_threshold", "confidence_threshold"} & set(arm.settings)
        if taken:
            raise UsageError(f"arm {arm.name}: {', '.join(sorted(taken))} has no meaning with --fixed-steps")
        chosen = chosen.replace(max_denoising_steps=fixed_steps, stability_threshold=fixed_steps)
    return dataclasses.replace(chosen, eos_token_ids=()) if endless else chosen
