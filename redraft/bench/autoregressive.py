"""Greedy next-token decoding: the encoder, which shares its weights with the decoder, is a causal language model.

A step sends every slot's last token through the causal layers, adds its keys and values to the arena, and takes the
largest logit of the head as the next token. Prompts are read up to their last token, so that every token of an answer
costs one step. Generation does not use this: it is what diffusion is compared with (`bench/compare_ar.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from redraft.engine.events import cut
from redraft.engine.graphs import GraphRunner, PassGraph
from redraft.engine.runner import read_whole
from redraft.network.arena import KVArena, SlotArena, SlotLayer
from redraft.network.fused import Buffers
from redraft.network.model import Model


class GreedyDecoder(Protocol):
    """A batch of answers, each of at most `max_new_tokens` tokens or up to its first end token."""

    def read(self, prompts: Sequence[list[int]]) -> None:
        """Begin answers to `prompts`: encode all but the last token of each. May return before the device is done."""
        ...

    def decode(self) -> list[list[int]]:
        """Token ids of every answer, the end token included. Called once after each `read`."""
        ...


class ReferenceGreedy:
    """On the reference network: prompts padded on the left, a step is an `encode` of one token."""

    def __init__(self, model: Model, max_new_tokens: int, end_tokens: Collection[int]):
        self.model, self.max_new_tokens, self.end_tokens = model, max_new_tokens, end_tokens

    def read(self, prompts: Sequence[list[int]]) -> None:
        config, device = self.model.config, self.model.device
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        rows = [[config.pad_token_id] * count + prompt for count, prompt in zip(padding, prompts, strict=True)]
        tokens, left = torch.tensor(rows, device=device), torch.tensor(padding, device=device)
        self._arena = KVArena(config, len(rows), longest + self.max_new_tokens, self.model.dtype, device, left)
        self._token = tokens[:, -1:]
        if longest > 1:
            self.model.encode(tokens[:, :-1], self._arena)

    def decode(self) -> list[list[int]]:
        ends = torch.tensor(sorted(self.end_tokens), dtype=torch.int64, device=self.model.device)
        ended = torch.zeros_like(self._token[:, 0], dtype=torch.bool)
        answers: list[torch.Tensor] = []
        while len(answers) < self.max_new_tokens and not bool(ended.all()):
            self._token = self.model.head(self.model.encode(self._token, self._arena)).argmax(dim=-1)
            answers.append(self._token)
            ended |= (self._token == ends).any(dim=1)
        return [cut(answer, self.end_tokens, len(answer))[0] for answer in torch.cat(answers, dim=1).tolist()]


class FusedGreedy:
    """On fused passes of one row a slot, in the slots and the arena of a GraphRunner; a step is one CUDA graph.

    Tokens, their count and the end test stay on the device. The host learns a step late whether all answers have ended.
    A slot whose answer has ended is computed on in vain. The runner needs room for prompt and answer; its own requests
    are gone after `read`.
    """

    def __init__(self, runner: GraphRunner, max_new_tokens: int, end_tokens: Collection[int]):
        self.runner, self.max_new_tokens, self.end_tokens = runner, max_new_tokens, end_tokens
        model, slots, device = runner.model, runner.slots, runner.model.device
        self._rows = Buffers(model, slots, 1)
        self._logits = torch.empty(slots, model.config.vocab_size, dtype=torch.bfloat16, device=device)
        self._token = torch.zeros(slots, dtype=torch.int64, device=device)
        self._answers = torch.zeros(slots, max_new_tokens, dtype=torch.int64, device=device)
        self._made = torch.zeros(1, dtype=torch.int64, device=device)
        self._ends = torch.tensor(sorted(end_tokens), dtype=torch.int64, device=device)
        self._ended = torch.zeros(slots, dtype=torch.bool, device=device)
        self._all_ended = torch.zeros(1, dtype=torch.bool, device=device)
        self._one_row = _first_rows(runner.arena, 1)
        self._all = torch.arange(slots, dtype=torch.int32, device=device)
        self._count = torch.zeros(slots, dtype=torch.int32, device=device)  # the warm-up steps commit nothing
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._step = PassGraph(self._launch, device, pool)
        self._count.fill_(1)

    def read(self, prompts: Sequence[list[int]]) -> None:
        """As GreedyDecoder.read, for as many prompts as there are slots."""
        assert len(prompts) == self.runner.slots, "a prompt for every slot"
        longest = max(map(len, prompts))
        assert longest - 1 + self.max_new_tokens <= self.runner.capacity, "the runner has room for prompt and answer"
        self.runner.reset()
        self.runner.arena.length.zero_()
        for slot, prompt in enumerate(prompts):
            read_whole(self.runner, slot, prompt[:-1])
        self._token.copy_(torch.tensor([prompt[-1] for prompt in prompts]))
        self._made.zero_()
        self._ended.zero_()

    def decode(self) -> list[list[int]]:
        earlier = None
        for _ in range(self.max_new_tokens):
            self._step.replay()
            flag = _Flag(self._all_ended) if self.end_tokens else None
            if earlier is not None and earlier.read():
                break
            earlier = flag
        return [cut(answer, self.end_tokens, len(answer))[0] for answer in self._answers.tolist()]

    def _launch(self) -> None:
        """One step of all slots: every launch of it, in order."""
        model, rows, slots = self.runner.model, self._rows, self._all
        model.embed(self._token, rows)
        model.run_layers(rows, self.runner.arena, slots, causal=True)
        model.commit(self._one_row, slots, self._count)
        # The soft-cap keeps the order of logits, so that the largest is found without it.
        torch.mm(rows.next_in, model.weights.embed.t(), out=self._logits)
        torch.argmax(self._logits, dim=-1, out=self._token)
        self._answers.index_copy_(1, self._made, self._token[:, None])
        self._made.add_(self._count[:1])
        self._ended.logical_or_((self._token[:, None] == self._ends).any(dim=1))
        self._all_ended.copy_(self._ended.all())


class _Flag:
    """A copy of a bool [1] on its way to the host."""

    def __init__(self, source: torch.Tensor):
        self._value = torch.empty(source.shape, dtype=torch.bool, pin_memory=source.is_cuda)
        self._value.copy_(source, non_blocking=True)
        self._event = torch.cuda.Event() if source.is_cuda else None
        if self._event is not None:
            self._event.record()

    def read(self) -> bool:
        if self._event is not None:
            self._event.synchronize()
        return bool(self._value)


def _first_rows(arena: SlotArena, count: int) -> SlotArena:
    """A view with room for `count` rows in flight: a commit launches programs for that room, 1,024 rows in a runner."""
    layers = []
    for kv in arena.layers:
        keys, values = (part[:, :, : kv.rows_cap + count] for part in (kv.keys, kv.values))
        layers.append(SlotLayer(keys, values, kv.rows_cap, kv.ring))
    return SlotArena(layers, arena.length)
