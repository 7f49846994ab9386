"""Greedy next-token decoding: the encoder, which shares its weights with the decoder, is a causal language model.

A step sends every slot's last token through the causal layers, adds its keys and values to the arena, and takes the
largest logit of the head as the next token. Prompts are read up to their last token, so that every token of an answer
costs one step. Generation does not use this: it is what diffusion is compared with (`bench/compare_ar.py`).
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from redraft.engine.events import cut
from redraft.engine.graphs import GraphRunner, PassGraph
from redraft.engine.runner import read_whole
from redraft.kernels.router import route
from redraft.network.arena import KVArena, SlotArena
from redraft.network.fused import Buffers
from redraft.network.model import Model
from redraft.network.weights import LayerWeights


class Greedy:
    """A batch of answers, one a slot, each of at most `max_new_tokens` tokens or up to its first end token.

    Tokens, their count and the end test stay on the device. A slot whose answer has ended is computed on in vain.
    """

    def __init__(self, slots: int, max_new_tokens: int, end_tokens: Collection[int], device: torch.device):
        self.slots, self.max_new_tokens, self.end_tokens = slots, max_new_tokens, end_tokens
        self._token, self._made = (torch.zeros(n, dtype=torch.int64, device=device) for n in (slots, 1))
        self._answers = torch.zeros(slots, max_new_tokens, dtype=torch.int64, device=device)
        self._ends = torch.tensor(sorted(end_tokens), dtype=torch.int64, device=device)
        self._ended, self._all_ended = (torch.zeros(n, dtype=torch.bool, device=device) for n in (slots, 1))
        self._count = torch.ones(slots, dtype=torch.int32, device=device)  # tokens that a step adds

    def read(self, prompts: Sequence[list[int]]) -> None:
        """Begin answers to a prompt for every slot. May return before the device is done."""
        assert len(prompts) == self.slots, "a prompt for every slot"
        self._encode(prompts)
        self._token.copy_(torch.tensor([prompt[-1] for prompt in prompts]))
        self._made.zero_()
        self._ended.zero_()

    def answer(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Token ids of every answer, the end token included."""
        self.read(prompts)
        return self.decode()

    def decode(self) -> list[list[int]]:
        """The answers to what was read. Called once after each `read`."""
        for _ in range(self.max_new_tokens):
            self._step()
            if self.end_tokens and self._over():
                break
        return [cut(answer, self.end_tokens, len(answer))[0] for answer in self._answers.tolist()]

    def _encode(self, prompts: Sequence[list[int]]) -> None:
        """All but the last token of each prompt."""
        raise NotImplementedError

    def _step(self) -> None:
        """Add a token to every answer."""
        raise NotImplementedError

    def _over(self) -> bool:
        """Whether all answers are known to have ended."""
        return bool(self._all_ended)

    def _take(self, logits: torch.Tensor) -> None:
        """Add the largest of each slot's logits [slots, V] to its answer, all on the device."""
        torch.argmax(logits, dim=-1, out=self._token)
        self._answers.index_copy_(1, self._made, self._token[:, None])
        self._made.add_(self._count[:1])
        self._ended.logical_or_((self._token[:, None] == self._ends).any(dim=1))
        self._all_ended.copy_(self._ended.all())


class ReferenceGreedy(Greedy):
    """On the reference network: prompts padded on the left, a step is an `encode` of one token."""

    def __init__(self, model: Model, slots: int, max_new_tokens: int, end_tokens: Collection[int]):
        super().__init__(slots, max_new_tokens, end_tokens, model.device)
        self.model = model

    def _encode(self, prompts: Sequence[list[int]]) -> None:
        config, device = self.model.config, self.model.device
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        rows = [[config.pad_token_id] * count + prompt[:-1] for count, prompt in zip(padding, prompts, strict=True)]
        tokens, left = (torch.tensor(values, dtype=torch.int64, device=device) for values in (rows, padding))
        self._arena = KVArena(config, self.slots, longest + self.max_new_tokens, self.model.dtype, device, left)
        if longest > 1:
            self.model.encode(tokens, self._arena)

    def _step(self) -> None:
        self._take(self.model.head(self.model.encode(self._token[:, None], self._arena))[:, 0])


class FusedGreedy(Greedy):
    """On fused passes of one row a slot, in the slots and the arena of a GraphRunner; a step is one CUDA graph.

    The host learns a step late whether all answers have ended. The runner needs room for prompt and answer; its own
    requests are gone after `read`.
    """

    def __init__(self, runner: GraphRunner, max_new_tokens: int, end_tokens: Collection[int]):
        model, slots, device = runner.model, runner.slots, runner.device
        super().__init__(slots, max_new_tokens, end_tokens, device)
        self.runner = runner
        self._rows = Buffers(model, slots, 1)
        self._logits = torch.empty(slots, model.config.vocab_size, dtype=torch.bfloat16, device=device)
        self._all = torch.arange(slots, dtype=torch.int32, device=device)
        # A commit launches programs for the rows in flight that there is room for: one here, 1,024 in a runner.
        layers = [
            replace(kv, keys=kv.keys[:, :, : kv.rows_cap + 1], values=kv.values[:, :, : kv.rows_cap + 1])
            for kv in runner.arena.layers
        ]
        self._one_row = SlotArena(layers, runner.arena.length)
        self._count.zero_()  # the warm-up steps commit nothing
        self._graph = PassGraph(self._launch, device)
        self._count.fill_(1)

    def _encode(self, prompts: Sequence[list[int]]) -> None:
        needed = max(map(len, prompts)) - 1 + self.max_new_tokens
        assert needed <= self.runner.capacity, "the runner has room for prompt and answer"
        self.runner.reset()
        self.runner.arena.length.zero_()
        for slot, prompt in enumerate(prompts):
            read_whole(self.runner, slot, prompt[:-1])
        self._flags: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []

    def _step(self) -> None:
        self._graph.replay()

    def _over(self) -> bool:
        """As of the step before: this one's end test is on its way to the host."""
        on_gpu = self._all_ended.is_cuda
        flag = torch.empty(1, dtype=torch.bool, pin_memory=on_gpu).copy_(self._all_ended, non_blocking=True)
        self._flags.append((flag, torch.cuda.current_stream().record_event() if on_gpu else None))
        if len(self._flags) == 1:
            return False
        flag, copied = self._flags.pop(0)
        if copied is not None:
            copied.synchronize()
        return bool(flag)

    def _launch(self) -> None:
        """One step of all slots: every launch of it, in order."""
        model, rows, slots = self.runner.model, self._rows, self._all
        model.embed(self._token, rows)
        model.run_layers(rows, self.runner.arena, slots, causal=True)
        model.commit(self._one_row, slots, self._count)
        # The soft-cap keeps the order of logits, so that the largest is found without it.
        self._take(torch.mm(rows.next_in, model.weights.embed.t(), out=self._logits))


class Routes(Model):
    """The reference network over an engine's weights, told which experts the tokens of an answer visited."""

    def __init__(self, model: Model):
        super().__init__(model.config, model.weights)
        self._chosen: list[torch.Tensor] = []  # by the layers of a pass
        self._known: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}

    def experts_per_step(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[int]:
        """Distinct experts, all layers together, that each step of a batch of answers read.

        By one causal pass over prompt and answer, which routes as the steps did, near-ties of BF16 aside.
        """
        shape = self.config.num_layers, max(map(len, answers)), self.config.num_experts
        visited = torch.zeros(shape, dtype=torch.bool)
        for prompt, answer in zip(prompts, answers, strict=True):
            visited[:, : len(answer)].scatter_(2, self.visits(prompt, answer), True)
        return visited.sum(dim=(0, 2)).tolist()

    def visits(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """Ids of the experts visited on the way to each token of the answer, int64 [layers, tokens, k] on the host."""
        read, count = (*prompt, *answer[:-1]), len(answer)
        if (read, count) not in self._known:
            self._chosen.clear()
            arena = KVArena(self.config, 1, len(read), self.dtype, self.device)
            self.encode(torch.tensor([read], device=self.device), arena)
            self._known[read, count] = torch.stack(self._chosen)[:, -count:].cpu()
        return self._known[read, count]

    def _feed_forward(self, x: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        proj, scale, per_expert = weights.router_proj, weights.router_scale, weights.per_expert_scale
        top_k, eps = self.config.top_k_experts, self.config.rms_norm_eps
        self._chosen.append(route(x.flatten(0, -2), proj, scale, per_expert, top_k, eps)[1])
        return super()._feed_forward(x, weights)
