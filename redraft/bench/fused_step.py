"""The fused passes of `graphs.SlotRunner` as a benchmark runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from redraft.bench.step import ENDLESS_SETTINGS, random_tokens
from redraft.engine.graphs import SlotRunner
from redraft.kernels.experts import expert_rows, prepare_rows
from redraft.kernels.self_conditioning import self_condition
from redraft.network.fused import FusedLayer, FusedModel


class FusedStep:
    """A batch in the slots of a SlotRunner; implements `step.DenoiseStep`."""

    name = "fused"
    capturable = True

    def __init__(self, model: FusedModel, batch: int, prompt_tokens: int, seed: int):
        self.model, self.config = model, model.config
        self.prompts = random_tokens(self.config.vocab_size, (batch, prompt_tokens), seed, model.device).tolist()
        self.runner = SlotRunner(model, batch, prompt_tokens)
        b = self.runner.work.rows
        # BF16 experts return a new tensor from every call: another of its shape serves for timing what follows.
        self._expert_rows = b.experts.out if b.experts else b.x.repeat_interleave(self.config.top_k_experts, dim=0)
        self.runner.reset()
        self.run_encode()
        self.run_pass()

    def run_pass(self) -> object:
        self.runner.run_pass()
        return self.runner.poll()

    def run_encode(self) -> object:
        for slot, prompt in enumerate(self.prompts):
            self.runner.admit(slot, prompt, ENDLESS_SETTINGS, seed=slot)
        return None

    def fused(self) -> Mapping[str, str]:
        return {}

    def parts(self) -> Mapping[str, Callable[[], object]]:
        """The launches of a pass by part; norms that end another launch (of the embedding, of q and k) stay there."""
        model, runner = self.model, self.runner
        rows = runner.work.rows

        def every_layer(call: Callable[[FusedLayer], object]) -> Callable[[], object]:
            return lambda: [call(layer) for layer in model.layers]

        return {
            "embed": lambda: model.embed(
                runner.canvases.tokens, rows, runner._all, runner.work.signal, runner.state.step
            ),
            "self-conditioning": self._self_condition,
            "attention": self._attention,
            "dense": every_layer(lambda layer: model.dense(layer, rows)),
            "router": every_layer(lambda layer: model.route(layer, rows)),
            "experts": every_layer(self._experts),
            "norms": every_layer(self._norms),
            "head": lambda: torch.mm(rows.next_in, model.weights.embed.t(), out=runner.work.logits),
            "sampling": self.runner.sample,
        }

    def _self_condition(self) -> None:
        model, runner = self.model, self.runner
        self_condition(
            runner.work.logits, model.weights.embed, model.weights.self_conditioning, model.conditioning_gate_up,
            runner.state.done, runner._all, model.embed_scale, self.config.rms_norm_eps, runner.work.conditioning,
            runner.work.signal,
        )  # fmt: skip

    def _attention(self) -> None:
        for index in range(len(self.model.layers)):
            self.model.attention(index, self.runner.work.rows, self.runner.arena, self.runner._all, causal=False)

    def _experts(self, layer: FusedLayer) -> None:
        b = self.runner.work.rows
        prepare_rows(b.expert_in, b.experts)
        expert_rows(b.expert_in, b.group_sums, layer.experts, b.assigned, b.experts)

    def _norms(self, layer: FusedLayer) -> None:
        """The two launches of `FusedModel.feed_forward` around its branches."""
        b = self.runner.work.rows
        self.model.join_attention(layer, b)
        self.model.join_feed_forward(layer, b, self._expert_rows, layer.weights.input_layernorm, causal=False)
