"""The demo tasks: disjoint sides, determinism, graders that accept the reference and reject its neighbours."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from redraft.demo.data import CANVAS, ROW, TASK_WEIGHTS
from redraft.demo.tasks import FACT_FAMILIES, TASKS, Item, is_heldout
from redraft.demo.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, build, encode_prompt

NAMES = tuple(TASKS)


def training_items(name: str, count: int, seed: int = 3) -> list[Item]:
    rng = random.Random(seed)
    return [TASKS[name].train_item(rng) for _ in range(count)]


@pytest.mark.parametrize("name", NAMES)
def test_heldout_parameters_never_occur_in_training(name: str) -> None:
    heldout = {item.params for item in TASKS[name].heldout_items(500)}
    training = {item.params for item in training_items(name, 1500)}
    assert not heldout & training
    assert all(is_heldout(name, p) for p in heldout)
    assert not any(is_heldout(name, p) for p in training)


def test_every_fact_is_seen_in_training() -> None:
    seen = {item.answer for item in training_items("facts", 3000)}
    assert seen == {f.answer.format(x=x, y=y) for f in FACT_FAMILIES for x, y in f.pairs}
    assert 40 <= len(seen) <= 60


@pytest.mark.parametrize("name", NAMES)
def test_items_depend_on_the_seed_alone(name: str) -> None:
    first, again = TASKS[name].heldout_items(500), TASKS[name].heldout_items(500)
    assert first == again
    assert len({item.prompt for item in first}) == 500
    assert first[:20] == TASKS[name].heldout_items(20)
    assert first != TASKS[name].heldout_items(500, seed=1)


def test_items_are_the_same_in_another_process() -> None:
    code = "from redraft.demo.tasks import TASKS; print([t.heldout_items(2) for t in TASKS.values()])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == repr([t.heldout_items(2) for t in TASKS.values()])


@pytest.mark.parametrize("name", NAMES)
def test_reference_answers_pass(name: str) -> None:
    for item in TASKS[name].heldout_items(10 if name == "code" else 300):
        assert TASKS[name].grade(item, item.answer), item


@pytest.mark.parametrize("name", NAMES)
def test_neighbouring_answers_fail(name: str) -> None:
    for item in TASKS[name].heldout_items(4 if name == "code" else 100):
        for wrong in ("", item.answer[:-1], item.answer + " and"):
            assert not TASKS[name].grade(item, wrong), (item, wrong)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("% ", "% 1"), ("> ", "> 1"), (" + ", " - "), ("range(", "range(1 + "), ("[:", "[1 + "), ("max", "min")],
)
def test_unit_tests_notice_changed_functions(right: str, wrong: str) -> None:
    items = [i for i in TASKS["code"].heldout_items(300) if right in i.answer][:2]
    assert items
    for item in items:
        assert not TASKS["code"].grade(item, item.answer.replace(right, wrong)), item


def test_arithmetic_grades_the_stated_number() -> None:
    item = Item("", "1 + 2 = 3. The answer is 3.", ())
    assert TASKS["arithmetic"].grade(item, "2 + 1 = 3. The answer is 3.")
    assert not TASKS["arithmetic"].grade(item, "1 + 2 = 3. The answer is 33.")
    assert not TASKS["arithmetic"].grade(item, "The answer is 3. Or not.")


def test_stories_must_use_the_requested_words_and_end() -> None:
    task = TASKS["stories"]
    item = task.heldout_items(1)[0]
    assert task.grade(item, item.answer)
    assert not task.grade(item, item.answer.replace(str(item.params[0]), "Nobody"))
    assert not task.grade(item, item.answer.rsplit(" ", 3)[0])
    assert not task.grade(item, item.answer.split(".")[0] + ".")


def test_tokenizer_round_trips_and_bounds() -> None:
    tokenizer = build(items_per_task=1000)
    assert len(tokenizer) <= VOCAB_SIZE <= 2048
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    assert [tokenizer.decode(i) for i in tokenizer("907")["input_ids"]] == ["9", "0", "7"]
    assert set(TASK_WEIGHTS) == set(TASKS)
    for name in TASKS:
        for item in TASKS[name].heldout_items(200):
            ids = tokenizer(item.answer)["input_ids"]
            assert tokenizer.decode(ids) == item.answer
            canvases = -(-(len(ids) + 1) // CANVAS)
            assert canvases == (2 if name == "stories" else 1), item
            assert len(encode_prompt(tokenizer, item.prompt)) + canvases * CANVAS <= ROW


def test_chat_template_has_gemma_turns() -> None:
    tokenizer = build(items_per_task=50)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": " Bye "},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n"
        "<|turn>model\nHello.<turn|>\n<|turn>user\nBye<turn|>\n<|turn>model\n"
    )
