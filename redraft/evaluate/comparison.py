"""A comparison from its arguments to its report: what is asked of whom, in which order, and what comes of it."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal

from redraft.bench.probe import probe
from redraft.config import DecodeSettings
from redraft.device import default_dtype, device_name, environment, free_memory
from redraft.errors import UsageError
from redraft.evaluate.arms import Arm, parse_arms
from redraft.evaluate.base import Question, Task, ask
from redraft.evaluate.charts import draw_charts
from redraft.evaluate.models import Models, needed_bytes, stored_packed
from redraft.evaluate.report import WARM_UP_STARTS, markdown
from redraft.evaluate.results import Folder, Results, run_id
from redraft.evaluate.run import Record, Side, allocated, answers
from redraft.evaluate.summary import arm_figures, by_task, compare_arms
from redraft.evaluate.tasks import StandIn, select_tasks
from redraft.files import write_text
from redraft.store.open import open_model
from redraft.store.random import is_random

WARM_UP_PASSES = 2  # of the questions that an arm only begins to answer before the clock starts


class Comparison:
    """Everything that decides a comparison, checked before anything is loaded.

    arms and tasks: comma-separated, as on the command line. shared: settings of all arms. fixed_steps: passes of every
    canvas. Raises UsageError or CheckpointError.
    """

    def __init__(
        self, model: str, arms: str, tasks: str, *, device: torch.device, data: Path | None = None, limit: int = 50,
        seed: int = 0, fixed_steps: int | None = None, shared: Mapping[str, Any] | None = None, in_place: bool = False,
    ):  # fmt: skip
        self.device, self.dtype, self.in_place = device, default_dtype(device), in_place
        parsed = parse_arms(arms, model)
        self.files = {name: open_model(name) for name in dict.fromkeys(arm.model for arm in parsed)}
        self.arms = [arm.resolved(stored_packed(self.files[arm.model])) for arm in parsed]
        self.random = [name for name in self.files if is_random(name)]
        self.settings = {}
        for arm in self.arms:
            base, endless = self.files[arm.model].settings, arm.model in self.random
            self.settings[arm.name] = arm_settings(arm, base, shared or {}, fixed_steps, endless)
        self.tasks: dict[str, Task] = {}
        for name in filter(None, map(str.strip, tasks.split(","))):
            self.tasks |= select_tasks(name, data, stand_in=len(self.random) == len(self.files))
        if not self.tasks:
            raise UsageError("--tasks names no task; give some, such as gsm8k,humaneval")
        self.questions = ask(self.tasks.values(), limit, seed)
        # What must be equal for answers to belong together.
        self.identity = {
            "model": model, "arms": ", ".join(self.settings), "tasks": ", ".join(self.tasks), "limit": limit,
            "seed": seed, "questions": fingerprint(self.questions), "fixed_steps": fixed_steps, "in_place": in_place,
            "dtype": str(self.dtype).removeprefix("torch."),
            "settings": {name: dataclasses.asdict(settings) for name, settings in self.settings.items()},
            "environment": environment(device),
        }  # fmt: skip

    def run(self, folder: Folder, progress: Callable[[Record, int, int], object]) -> list[Record]:
        """Answer what is still open and return all answers. An interruption loses the answer under way.

        progress(answer, answers so far, answers in all).
        """
        if "probe" not in folder.facts:
            folder.note(probe=probe(self.device).to_dict(), why_in_place=self._why_in_place(), about={})
        together, total = folder.facts["why_in_place"] is None, len(self.arms) * len(self.questions)
        models = Models(self.files, self.device, self.dtype, in_place=not together)

        def opened(side: Side) -> None:
            folder.note(about={**folder.facts["about"], side.name: side.about})

        with Results(folder.items, folder.run) as results:
            new = answer_all(models, groups(self.arms, together), self.questions, self.settings, results.done, opened)
            return results.gather(new, lambda record: progress(record, len(results.records), total))

    def _why_in_place(self) -> str | None:
        """Why not all arms are loaded at once, None when they are."""
        if self.in_place:
            return "--in-place was given"
        free, needed = free_memory(self.device), needed_bytes(self.arms, self.files, self.dtype)
        if free is None or needed <= free:
            return None
        return f"the arms take about {decimal(needed)} together and {decimal(free)} were free"

    def write_report(self, folder: Folder, records: list[Record]) -> dict[str, Any]:
        """Write report.json, report.md and the charts into the folder, and return what report.json holds."""
        names, tasks = list(self.settings), list(self.tasks)
        why, about = folder.facts["why_in_place"], folder.facts["about"]
        report = {
            **self.identity,
            "arms": [{"name": a.name, "description": a.describe(), "about": about.get(a.name, {})} for a in self.arms],
            "tasks": tasks, "questions": len(self.questions), "together": why is None, "why_in_place": why,
            "random_weights": self.random,
            "stand_ins": [name for name, task in self.tasks.items() if isinstance(task, StandIn)],
            "device": str(self.device), "device_name": device_name(self.device), "probe": folder.facts["probe"],
            "results": {name: by_task([r for r in records if r.arm == name], tasks, arm_figures) for name in names},
            "comparisons": compare_arms(records, names, tasks),
        }  # fmt: skip
        write_text(folder.path / "report.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        charts = draw_charts(folder.path, report, records)
        write_text(folder.path / "report.md", markdown(report, charts))
        return report


def fingerprint(questions: Sequence[Question]) -> str:
    """A short name of what is asked and expected."""
    return run_id([[q.item.id, q.item.prompt, q.item.expected, q.seed] for q in questions])


def arm_settings(
    arm: Arm, base: DecodeSettings, shared: Mapping[str, Any], fixed_steps: int | None, endless: bool
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


def groups(arms: Sequence[Arm], together: bool) -> list[list[Arm]]:
    """Arms that take turns: all of them, or one group per set of weights, BF16 before the W4 that is made of it."""
    if together:
        return [list(arms)]
    holders = sorted({arm.holder for arm in arms}, key=lambda h: (h[0], h[1] == "engine", h[2] == "w4"))
    return [[arm for arm in arms if arm.holder == holder] for holder in holders]


def answer_all(
    models: Models, grouped: Sequence[Sequence[Arm]], questions: Sequence[Question],
    settings: Mapping[str, DecodeSettings], done: set[tuple[str, str]], opened: Callable[[Side], None],
) -> Iterator[Record]:  # fmt: skip
    """Answer every question by every arm but for the (arm name, item id) in `done`.

    settings: complete, by arm name. opened(side): an arm is ready. A group with nothing left to do is not loaded.
    """
    for number, group in enumerate(grouped):
        if any((arm.name, q.item.id) not in done for arm in group for q in questions):
            yield from answers(_sides(models, group, questions, settings, opened), questions, done)
        models.close([arm for following in grouped[number + 1 :] for arm in following])


def _sides(
    models: Models, arms: Sequence[Arm], questions: Sequence[Question], settings: Mapping[str, DecodeSettings],
    opened: Callable[[Side], None],
) -> list[Side]:  # fmt: skip
    """Load arms and warm them up.

    An arm gives one whole answer, to the longest question, so that every buffer is as large as it gets; then only the
    start of an answer to some more, because kernels are compiled for the lengths of prompts as they come.
    """
    loaded = {  # BF16 first: the W4 model is made of it
        arm.name: dataclasses.replace(models.open(arm), settings=vars(settings[arm.name]))
        for arm in sorted(arms, key=lambda arm: arm.weights == "w4")
    }
    longest = max(questions, key=lambda question: len(question.item.prompt))
    kept: Counter[Any] = Counter()
    for arm in arms:
        side, before = loaded[arm.name], allocated(models.device)
        side.generate([longest])
        for question in questions[:WARM_UP_STARTS]:
            side.generate([question], max_new_tokens=1, max_denoising_steps=WARM_UP_PASSES)
        kept[arm.holder, arm.tier] += max(0, allocated(models.device) - before)
        opened(side)
    return [dataclasses.replace(loaded[arm.name], kept_bytes=kept[arm.holder, arm.tier]) for arm in arms]
