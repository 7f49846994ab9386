"""Bytes and operations that whole answers must cost after their prompts were read, by diffusion and token by token.

Passes are counted as in `work.py`, each over the rows that still had an answer to find: what an implementation computes
for answers that have ended counts against it. A canvas visits about every expert; the few rows of a token step do not,
and the experts that they read are taken from their routing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest

import torch

from redraft.bench.roofline import Work
from redraft.bench.work import Shapes, encode_work, pass_work
from redraft.kernels.router import route
from redraft.network.arena import KVArena
from redraft.network.model import Model
from redraft.network.weights import LayerWeights


def diffusion_work(
    shapes: Shapes, prompts: Sequence[int], steps: Sequence[Sequence[int]], lockstep: bool
) -> tuple[Work, int]:
    """Work of the denoise passes and of the commits between canvases, and the number of passes of the whole batch.

    prompts: tokens of each request; steps: its passes by canvas. lockstep: requests begin every canvas together, as on
    the reference network; in slots each goes on at its own pace.
    """
    length = shapes.config.canvas_length
    passes = denoise_passes(prompts, steps, length, lockstep)
    work = Work.total(w for prefixes in passes for w in pass_work(shapes, len(prefixes), _mean(prefixes)).values())
    one = encode_work(shapes, length)
    for canvas in range(1, max(map(len, steps))):
        commits = sum(len(own) > canvas for own in steps)
        work += Work(one.bytes * (1 if lockstep else commits), one.flops * commits)
    return work, len(passes)


def denoise_passes(
    prompts: Sequence[int], steps: Sequence[Sequence[int]], length: int, lockstep: bool
) -> list[list[int]]:
    """For each pass of the batch, the committed tokens of every request that it moved on."""
    rows: list[list[int | None]] = []
    for prompt, own in zip(prompts, steps, strict=True):
        row: list[int | None] = []
        for canvas, count in enumerate(own):
            row += [prompt + canvas * length] * count
            if lockstep:
                row += [None] * (max(other[canvas] for other in steps if canvas < len(other)) - count)
        rows.append(row)
    return [_present(column) for column in zip_longest(*rows)]


def autoregressive_work(shapes: Shapes, prompts: Sequence[int], answers: Sequence[int], experts: Sequence[int]) -> Work:
    """Work of the steps of answers of `answers` tokens to prompts of `prompts` tokens.

    experts: distinct experts that each step visits, over all layers together.
    """
    rows = [range(prompt - 1, prompt - 1 + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    prefixes = [_present(column) for column in zip_longest(*rows)]
    return Work.total(
        step_work(shapes, len(own), _mean(own), visited) for own, visited in zip(prefixes, experts, strict=True)
    )


def step_work(shapes: Shapes, batch: int, prefix: int, experts: int) -> Work:
    """Work of one token of `batch` requests over `prefix` committed tokens each, head and argmax included."""
    config = shapes.config
    parts = pass_work(replace(shapes, config=replace(config, canvas_length=1)), batch, prefix)
    del parts["self-conditioning"]
    parts["sampling"] = Work(parts["sampling"].bytes, batch * config.vocab_size)  # the argmax
    hidden = 2 * config.num_layers * batch * config.hidden_size * shapes.itemsize
    parts["experts"] = Work(experts * shapes.expert_bytes + hidden, parts["experts"].flops)
    return Work.total(parts.values())


class Routes(Model):
    """The reference network over an engine's weights, told which experts the tokens of an answer visited."""

    def __init__(self, model: Model):
        super().__init__(model.config, model.weights)
        self._chosen: list[torch.Tensor] = []
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def experts_per_step(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[int]:
        """Distinct experts, all layers together, that each step of a batch of answers read.

        By one causal pass over prompt and answer, which routes as the steps did, near-ties of BF16 aside.
        """
        visits = [self._visits(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        layers, _, experts = visits[0].shape
        together = torch.zeros(layers, max(map(len, answers)), experts, dtype=torch.bool)
        for one in visits:
            together[:, : one.shape[1]] |= one
        return together.sum(dim=(0, 2)).tolist()

    def _visits(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """bool [layers, answer tokens, E]: the experts visited on the way to each token of the answer."""
        tokens = (*prompt, *answer[:-1])
        if tokens not in self._known:
            self._chosen = []
            arena = KVArena(self.config, 1, len(tokens), self.dtype, self.device)
            self.encode(torch.tensor([tokens], device=self.device), arena)
            chosen = torch.stack(self._chosen)[:, -len(answer) :].cpu()
            empty = torch.zeros(*chosen.shape[:2], self.config.num_experts, dtype=torch.bool)
            self._known[tokens] = empty.scatter_(2, chosen, True)
        return self._known[tokens]

    def _feed_forward(self, x: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        flat, config = x.flatten(0, -2), self.config
        _, chosen = route(
            flat, weights.router_proj, weights.router_scale, weights.per_expert_scale, config.top_k_experts,
            config.rms_norm_eps,
        )  # fmt: skip
        self._chosen.append(chosen)
        return super()._feed_forward(x, weights)


def _present(column: Iterable[int | None]) -> list[int]:
    return [value for value in column if value is not None]


def _mean(values: Sequence[int]) -> int:
    return round(sum(values) / len(values))
