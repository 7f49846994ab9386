"""Training batches for the demo model: items drawn, tokenised and laid out in worker processes."""

import multiprocessing as mp
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from recipes.demo.tasks import TASKS
from recipes.demo.tokenizer import TURN_END, encode_prompt

CANVAS = 64
ROW = 160  # longest prompt of any task (51) plus one canvas, or a story's prompt (28) plus two
TASK_WEIGHTS = {"arithmetic": 0.29, "edit": 0.16, "lists": 0.23, "facts": 0.05, "stories": 0.12, "code": 0.15}


@dataclass(frozen=True)
class Batch:
    """Rows of [prompt, answer, <turn|>, padding to whole canvases, padding].

    tokens int16 [B, ROW]; prompt, end (index of <turn|>) and start (first index of the canvas to denoise) int16 [B].
    """

    tokens: NDArray[np.int16]
    prompt: NDArray[np.int16]
    end: NDArray[np.int16]
    start: NDArray[np.int16]


class BatchMaker:
    """Draws batches from the task generators, training side only."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        around = encode_prompt(tokenizer, "\0")
        middle = len(tokenizer("\0")["input_ids"])
        at = next(i for i in range(len(around)) if around[i : i + middle] == tokenizer("\0")["input_ids"])
        self.before, self.after = around[:at], around[at + middle :]
        self.turn_end = tokenizer.convert_tokens_to_ids(TURN_END)

    def batch(self, rows: int) -> Batch:
        names = self.rng.choices(tuple(TASK_WEIGHTS), tuple(TASK_WEIGHTS.values()), k=rows)
        items = [TASKS[name].train_item(self.rng) for name in names]
        prompts = self.tokenizer([i.prompt for i in items])["input_ids"]
        answers = self.tokenizer([i.answer for i in items])["input_ids"]
        tokens = np.full((rows, ROW), self.tokenizer.pad_token_id, np.int16)
        prompt, end, start = (np.zeros(rows, np.int16) for _ in range(3))
        for i, (p, a) in enumerate(zip(prompts, answers, strict=True)):
            row = [*self.before, *p, *self.after, *a, self.turn_end]
            prompt[i] = len(row) - len(a) - 1
            end[i] = len(row) - 1
            canvases = -(-(len(a) + 1) // CANVAS)
            if prompt[i] + canvases * CANVAS > ROW:
                raise ValueError(f"{names[i]} needs {prompt[i]} + {canvases} canvases, more than a row of {ROW}")
            tokens[i, : len(row)] = row
            start[i] = prompt[i] + CANVAS * self.rng.randrange(canvases)
        return Batch(tokens, prompt, end, start)


def _work(tokenizer_dir: str, seed: int, rows: int, queue: Any) -> None:
    maker = BatchMaker(AutoTokenizer.from_pretrained(tokenizer_dir), seed)
    while True:
        queue.put(maker.batch(rows))


def stream(tokenizer_dir: Path, rows: int, workers: int, seed: int) -> Iterator[Batch]:
    """Batches without end. With 0 workers they are made here, in a fixed order."""
    if workers == 0:
        maker = BatchMaker(AutoTokenizer.from_pretrained(tokenizer_dir), seed)
        while True:
            yield maker.batch(rows)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read by the workers: one thread each is what they have
    context = mp.get_context("spawn")
    queue = context.Queue(maxsize=8 * workers)
    for i in range(workers):
        arguments = (str(tokenizer_dir), seed * 1000 + i, rows, queue)
        context.Process(target=_work, args=arguments, daemon=True).start()
    while True:
        yield queue.get()
