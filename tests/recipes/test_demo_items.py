"""The generators of the demo tasks and the tokenizer: disjoint sides, determinism, the items that ship."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.demo import heldout
from recipes.demo.data import CANVAS, ROW, TASK_WEIGHTS
from recipes.demo.tasks import FACT_FAMILIES, TASKS, Item, is_heldout
from recipes.demo.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, build, encode_prompt
from redraft.evaluate.demo import FILE

ROOT = Path(__file__).parents[2]


def training_items(name: str, count: int) -> list[Item]:
    rng = random.Random(3)
    return [TASKS[name].train_item(rng) for _ in range(count)]


@pytest.mark.parametrize("name", TASKS)
def test_heldout_items_depend_on_the_seed_alone_and_never_occur_in_training(name: str) -> None:
    first = TASKS[name].heldout_items(500)
    assert first == TASKS[name].heldout_items(500)
    assert len({item.prompt for item in first}) == 500
    assert first[:20] == TASKS[name].heldout_items(20)
    assert first != TASKS[name].heldout_items(500, seed=1)
    heldout, training = ({item.params for item in items} for items in (first, training_items(name, 1500)))
    assert not heldout & training
    assert all(is_heldout(name, p) for p in heldout)
    assert not any(is_heldout(name, p) for p in training)


def test_every_fact_is_seen_in_training() -> None:
    seen = {item.answer for item in training_items("facts", 3000)}
    assert seen == {f.answer.format(x=x, y=y) for f in FACT_FAMILIES for x, y in f.pairs}
    assert 40 <= len(seen) <= 60


def test_items_are_the_same_in_another_process() -> None:
    code = "from recipes.demo.tasks import TASKS; print([t.heldout_items(2) for t in TASKS.values()])"
    out = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)
    assert out.strip() == repr([t.heldout_items(2) for t in TASKS.values()])


def test_the_items_that_ship_are_those_of_the_generators() -> None:
    assert "".join(heldout.lines()).encode() == FILE.read_bytes(), "run python -m recipes.demo.heldout"
    assert FILE.stat().st_size < 1_500_000
    with pytest.raises(ValueError, match="task facts has only 832 held-out prompts, 833 asked for"):
        TASKS["facts"].heldout_items(833)


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
    turns = (("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", " Bye "))
    messages = [{"role": role, "content": content} for role, content in turns]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n"
        "<|turn>model\nHello.<turn|>\n<|turn>user\nBye<turn|>\n<|turn>model\n"
    )
