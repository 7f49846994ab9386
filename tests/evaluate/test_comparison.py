"""The run of a comparison without a network: turns, groups, seeds, warm-up, what a folder keeps."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluate.answers import Echo

from redraft.config import DecodeSettings
from redraft.engine.events import Result
from redraft.errors import UsageError
from redraft.evaluate.arms import Arm, parse_arms
from redraft.evaluate.base import ask, item_seed
from redraft.evaluate.comparison import answer_all, arm_settings, fingerprint, groups
from redraft.evaluate.results import Folder, Results
from redraft.evaluate.run import Record, Side

ARMS = [arm.resolved(False) for arm in parse_arms("bf16,w4,turbo", "demo")]
QUESTIONS = ask([Echo()], 3, seed=5)
SETTINGS = {arm.name: DecodeSettings() for arm in ARMS}


class FakeModels:
    """Answers every prompt with itself, and keeps a diary."""

    device = torch.device("cpu")

    def __init__(self, fail_at: int | None = None) -> None:
        self.diary: list[tuple[str, str, int]] = []
        self.started: list[tuple[str, str, int]] = []
        self.opened: list[str] = []
        self.closed, self.fail_at = 0, fail_at

    def open(self, arm: Arm) -> Side:
        self.opened.append(arm.name)

        def generate_batch(prompts: Sequence[str], *, seed: Sequence[int], **settings: Any) -> list[Result]:
            (prompt,), (one,) = prompts, seed
            if len(self.diary) == self.fail_at:
                raise KeyboardInterrupt
            if settings["max_new_tokens"] == 1:
                self.started.append((arm.name, prompt, settings["max_denoising_steps"]))
            else:
                self.diary.append((arm.name, prompt, one))
            text = f"You said: {prompt}\u2028."  # a separator that splitlines() would cut at
            return [Result([5, 6], 2, 7, [4], 0.1, "stop", one, 0, text=text)]

        return Side(arm.name, generate_batch, self.device, weight_bytes=100)

    def close(self, following: Sequence[Arm]) -> None:
        self.closed += 1


def run(models: FakeModels, grouped: list[list[Arm]], done: Collection[tuple[str, str]] = ()) -> Iterator[Record]:
    told: list[str] = []
    yield from answer_all(models, grouped, QUESTIONS, SETTINGS, set(done), lambda side: told.append(side.name))  # type: ignore[arg-type]
    assert sorted(told) == sorted(models.opened)


def test_arms_that_fit_take_turns_after_a_warm_up_each() -> None:
    models = FakeModels()
    records = list(run(models, groups(ARMS, together=True)))
    warm_up, rest = models.diary[:3], models.diary[3:]
    assert warm_up == [(name, "0", item_seed(5, 0)) for name in ("bf16", "w4", "turbo")]
    assert models.started == [(name, prompt, 2) for name in ("bf16", "w4", "turbo") for prompt in "012"]
    assert [(r.arm, r.id, r.turn) for r in records[:6]] == [
        ("bf16", "echo/0", 0), ("w4", "echo/0", 1), ("turbo", "echo/0", 2),
        ("turbo", "echo/1", 0), ("w4", "echo/1", 1), ("bf16", "echo/1", 2),
    ]  # fmt: skip
    assert [(r.arm, r.prompt, r.seed) for r in records] == rest  # the warm-up is in no record
    assert all(seed == item_seed(5, int(prompt)) for _, prompt, seed in rest)
    assert models.closed == 1


def test_arms_that_do_not_fit_answer_one_after_the_other() -> None:
    models = FakeModels()
    grouped = groups([ARMS[1], ARMS[2], ARMS[0]], together=False)
    assert [[arm.name for arm in group] for group in grouped] == [["bf16"], ["w4", "turbo"]]
    records = list(run(models, grouped))
    assert [r.arm for r in records[:4]] == ["bf16", "bf16", "bf16", "w4"]
    assert models.opened == ["bf16", "w4", "turbo"]


def test_what_is_done_is_neither_asked_nor_loaded() -> None:
    models = FakeModels()
    done = {("bf16", q.item.id) for q in QUESTIONS} | {("w4", "echo/0"), ("turbo", "echo/2")}
    records = [(r.arm, r.id) for r in run(models, groups(ARMS, together=False), done)]
    assert models.opened == ["w4", "turbo"]
    assert records == [("turbo", "echo/0"), ("turbo", "echo/1"), ("w4", "echo/1"), ("w4", "echo/2")]


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ab"
    first = Folder(path, {"model": "demo"})
    first.note(probe={"gbps": 1})
    grouped = groups(ARMS, together=True)
    with pytest.raises(KeyboardInterrupt), Results(first.items, first.run) as results:
        results.gather(run(FakeModels(3 + 4), grouped), repr)
    part = path / "items.jsonl.part"
    part.write_bytes(part.read_bytes()[:-20])  # the power went while the last line was written
    again = Folder(path, {"model": "demo"})
    assert (again.facts, again.finished()) == ({"probe": {"gbps": 1}}, None)
    with Results(again.items, again.run) as results:
        assert len(results.done) == 3
        results.gather(run(FakeModels(), grouped, results.done), repr)
    records = Folder(path, {"model": "demo"}).finished()
    assert records is not None and len(records) == len({(r.arm, r.id) for r in records}) == 9
    assert all(r.answer == f"You said: {r.prompt}\u2028." for r in records)
    assert not part.exists()


def test_questions_are_told_apart() -> None:
    assert fingerprint(QUESTIONS) == fingerprint(ask([Echo()], 3, seed=5))
    assert fingerprint(QUESTIONS) != fingerprint(ask([Echo()], 3, seed=6))
    assert fingerprint(QUESTIONS) != fingerprint(QUESTIONS[:2])


def test_settings_of_an_arm() -> None:
    base = DecodeSettings(eos_token_ids=(1, 4))
    arm = parse_arms("w4+entropy_bound=0.5,bf16", "demo")[0]
    mine = arm_settings(arm, base, {"max_new_tokens": 64}, fixed_steps=9, endless=False)
    assert (mine.entropy_bound, mine.max_new_tokens, mine.eos_token_ids) == (0.5, 64, (1, 4))
    # Nine equal canvases before the present one cannot come together in nine passes.
    assert (mine.max_denoising_steps, mine.stability_threshold) == (9, 9)
    assert arm_settings(arm, base, {}, None, endless=True).eos_token_ids == ()
    clash = parse_arms("bf16,w4+max_denoising_steps=5", "demo")[1]
    with pytest.raises(UsageError, match="max_denoising_steps has no meaning with --fixed-steps"):
        arm_settings(clash, base, {}, fixed_steps=9, endless=False)
