"""Held-out accuracy of a demo checkpoint with transformers' own `generate`: `python -m recipes.demo.measure DIR`."""

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion, PreTrainedTokenizerBase

from recipes.demo.tokenizer import TURN_END, encode_prompt
from redraft.evaluate.base import Item
from redraft.evaluate.demo import TASKS, DemoTask


def answer_text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str | None:
    """Text before the end of the turn; None when the turn never ends."""
    stop = tokenizer.convert_tokens_to_ids(TURN_END)
    return str(tokenizer.decode(ids[: ids.index(stop)])) if stop in ids else None


@torch.no_grad()
def generate(
    model: DiffusionGemmaForBlockDiffusion, tokenizer: PreTrainedTokenizerBase, prompts: list[str], seed: int = 0
) -> tuple[list[str | None], Tensor]:
    """(answers, tokens per forward float [N]) for one left-padded batch."""
    rows = [encode_prompt(tokenizer, p) for p in prompts]
    width = max(map(len, rows))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(r)) + r for r in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=model.device)
    torch.manual_seed(seed)
    out = model.generate(ids, attention_mask=mask)
    answers = [answer_text(tokenizer, row) for row in out.sequences[:, width:].tolist()]
    return answers, out.tokens_per_forward.float().cpu()


def grade(task: DemoTask, items: list[Item], answers: list[str | None]) -> list[bool]:
    """Grades in parallel: code runs in subprocesses."""

    def one(pair: tuple[Item, str | None]) -> bool:
        item, answer = pair
        return answer is not None and task.grade(item, answer)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, zip(items, answers, strict=True)))


def measure(
    model: DiffusionGemmaForBlockDiffusion,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    names: tuple[str, ...] = tuple(TASKS),
    batch: int = 1000,
) -> Iterator[dict[str, Any]]:
    """One row of results per task over its first `count` held-out items, with three wrong answers to look at."""
    model.eval()
    items = {name: TASKS[name].items(count) for name in names}
    prompts = [i.prompt for name in names for i in items[name]]
    answers: list[str | None] = []
    speeds: list[float] = []
    for at in range(0, len(prompts), batch):
        texts, speed = generate(model, tokenizer, prompts[at : at + batch], seed=at)
        answers += texts
        speeds += speed.tolist()
    at = 0
    for name, own in items.items():
        part = slice(at, at := at + len(own))
        right = grade(TASKS[name], own, answers[part])
        triples = zip(own, answers[part], right, strict=True)
        yield {
            "task": name,
            "items": len(own),
            "accuracy": sum(right) / len(own),
            "tokens_per_forward": sum(speeds[part]) / len(own),
            "wrong": [[i.prompt, i.expected, a] for i, a, ok in triples if not ok][:3],
        }
    model.train()


def main() -> None:
    parser = argparse.ArgumentParser(prog="recipes.demo.measure", description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--limit", type=int, default=500, help="held-out items per task")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--task", choices=tuple(TASKS), action="append", help="may be given several times; all if not")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    model: Any = DiffusionGemmaForBlockDiffusion.from_pretrained(args.checkpoint, dtype=torch.bfloat16)
    for row in measure(model.to(device), tokenizer, args.limit, tuple(args.task or TASKS), args.batch):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
