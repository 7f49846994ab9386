"""A comparison from its arguments to its report: what is asked of whom, in which order, and what comes of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal

from redraft.bench.probe import probe
from redraft.device import default_dtype, device_name, environment, free_memory
from redraft.errors import UsageError
from redraft.evaluate.ab_run import AbRecord, Folder, answer_all, arm_settings, ask, fingerprint, groups
from redraft.evaluate.arms import Arm, parse_arms
from redraft.evaluate.charts import draw_charts
from redraft.evaluate.models import Models, Opened, checkpoint_files, needed_bytes, stored_packed
from redraft.evaluate.report import markdown
from redraft.evaluate.standin import LENGTHS, StandIn
from redraft.evaluate.summary import compare_arms, summarise_arms
from redraft.evaluate.tasks import Task, select_tasks
from redraft.files import write_text
from redraft.store.random import is_random

Progress = Callable[[AbRecord, int, int], None]  # (answer, answers so far, answers in all)


class Comparison:
    """Everything that decides a comparison, checked before anything is loaded.

    arms and tasks: comma-separated, as on the command line. shared: settings of all arms. fixed_steps: passes of every
    canvas. Raises UsageError or CheckpointError.
    """

    def __init__(
        self,
        model: str,
        arms: str,
        tasks: str,
        *,
        device: torch.device,
        data: Path | None = None,
        limit: int = 50,
        seed: int = 0,
        fixed_steps: int | None = None,
        shared: dict[str, Any] | None = None,
        in_place: bool = False,
    ):
        self.model, self.device, self.dtype = model, device, default_dtype(device)
        self.limit, self.seed, self.fixed_steps, self.in_place = limit, seed, fixed_steps, in_place
        parsed = parse_arms(arms, model)
        self.files = {name: checkpoint_files(name) for name in dict.fromkeys(arm.model for arm in parsed)}
        self.arms = [arm.resolved(stored_packed(self.files[arm.model])) for arm in parsed]
        self.random = [name for name in self.files if is_random(name)]
        self.settings = {
            arm.name: arm_settings(
                arm, self.files[arm.model].settings, shared or {}, fixed_steps, endless=arm.model in self.random
            )
            for arm in self.arms
        }
        self.tasks = choose_tasks(tasks, data, stand_in=len(self.random) == len(self.files))
        self.questions = ask(list(self.tasks.values()), limit, seed)

    def identity(self) -> dict[str, Any]:
        """What must be equal for answers to belong together."""
        return {
            "model": self.model,
            "arms": ", ".join(arm.name for arm in self.arms),
            "tasks": ", ".join(self.tasks),
            "limit": self.limit,
            "seed": self.seed,
            "questions": fingerprint(self.questions),
            "fixed_steps": self.fixed_steps,
            "in_place": self.in_place,
            "dtype": str(self.dtype).removeprefix("torch."),
            "settings": {name: dataclasses.asdict(settings) for name, settings in self.settings.items()},
            "environment": environment(self.device),
        }

    def run(self, folder: Folder, progress: Progress) -> list[AbRecord]:
        """Answer what is still open and return all answers. An interruption loses the answer under way."""
        if "probe" not in folder.facts:
            folder.note(probe=probe(self.device).to_dict(), why_in_place=self._why_in_place(), about={})
        together = folder.facts["why_in_place"] is None
        models = Models(self.files, self.device, self.dtype, in_place=not together)

        def opened(arm: Arm, how: Opened) -> None:
            folder.note(about={**folder.facts["about"], arm.name: how.about})

        with folder.results_file() as file:
            records = list(file.done)
            done = {(r.arm, r.id) for r in records}
            total = len(self.arms) * len(self.questions)
            for record in answer_all(models, groups(self.arms, together), self.questions, self.settings, done, opened):
                file.append(record)
                records.append(record)
                progress(record, len(records), total)
        return records

    def _why_in_place(self) -> str | None:
        """Why not all arms are loaded at once, None when they are."""
        if self.in_place:
            return "--in-place was given"
        free, needed = free_memory(self.device), needed_bytes(self.arms, self.files, self.dtype)
        if free is None or needed <= free:
            return None
        return f"the arms take about {decimal(needed)} together and {decimal(free)} were free"

    def write_report(self, folder: Folder, records: list[AbRecord]) -> dict[str, Any]:
        """Write report.json, report.md and the charts into the folder, and return what report.json holds."""
        names, tasks = [arm.name for arm in self.arms], list(self.tasks)
        report = {
            **self.identity(),
            "arms": [
                {"name": arm.name, "description": arm.describe(), "about": folder.facts["about"].get(arm.name, {})}
                for arm in self.arms
            ],
            "tasks": tasks,
            "questions": len(self.questions),
            "together": folder.facts["why_in_place"] is None,
            "why_in_place": folder.facts["why_in_place"],
            "random_weights": self.random,
            "stand_ins": [name for name, task in self.tasks.items() if isinstance(task, StandIn)],
            "device": str(self.device),
            "device_name": device_name(self.device),
            "probe": folder.facts["probe"],
            "results": summarise_arms(records, names, tasks),
            "comparisons": compare_arms(records, names, tasks),
        }
        write_text(folder.path / "report.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        charts = draw_charts(folder.path, report, records)
        write_text(folder.path / "report.md", markdown(report, charts))
        return report


def choose_tasks(text: str, data: Path | None, stand_in: bool) -> dict[str, Task]:
    """The tasks of a comma-separated list; stand-ins for benchmarks without `data` where `stand_in` allows them."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise UsageError("--tasks names no task; give some, such as gsm8k,humaneval")
    tasks: dict[str, Task] = {}
    for name in names:
        tasks |= {name: StandIn(name)} if stand_in and data is None and name in LENGTHS else select_tasks(name, data)
    return tasks
