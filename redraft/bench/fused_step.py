"""Captured passes of `graphs.GraphRunner` as a benchmark runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from redraft.bench.passes import ENDLESS_SETTINGS, random_tokens
from redraft.decode.entropy_bound import ENTROPY_BOUND
from redraft.engine.graphs import GraphRunner
from redraft.engine.runner import admit_prompts
from redraft.kernels.experts import expert_rows, prepare_rows
from redraft.network.fused import FusedLayer, FusedModel


class FusedStep:
    """A batch in the first of the slots of a GraphRunner; implements `passes.DenoiseStep`."""

    name = "fused"
    capturable = True

    def __init__(self, model: FusedModel, batch: int, prompt_tokens: int, seed: int, slots: int = 0):
        self.model, self.config = model, model.config
        self.prompts = random_tokens(self.config.vocab_size, (batch, prompt_tokens), seed, model.device).tolist()
        self.runner = GraphRunner(model, max(slots, batch), prompt_tokens)
        self.slots = list(range(batch))
        width = min(width for width in self.runner.work.passes if width >= batch)
        self._pass, self._table = self.runner.work.passes[width], self.runner.work.lanes[width].table
        b = self._pass.rows
        # BF16 experts return a new tensor from every call: another of its shape serves for timing what follows.
        self._expert_rows = b.experts.out if b.experts else b.x.repeat_interleave(self.config.top_k_experts, dim=0)
        self.run_encode()
        self.run_pass()

    def run_pass(self) -> object:
        self.runner.run_pass(self.slots)
        return self.runner.poll()

    def run_encode(self) -> object:
        self.runner.reset()
        admit_prompts(self.runner, self.prompts, ENTROPY_BOUND, ENDLESS_SETTINGS)
        self.runner.start(self.slots)
        return None

    def parts(self) -> Mapping[str, Callable[[], object]]:
        """The launches of a pass by part; norms that end another launch (of the embedding, of q and k) stay there."""
        model, runner, work, table = self.model, self.runner, self._pass, self._table
        state, own = runner.state, runner.own(ENTROPY_BOUND)

        def every_layer(call: Callable[[FusedLayer], object]) -> Callable[[], object]:
            return lambda: [call(layer) for layer in model.layers]

        def sampling() -> None:
            work.sample(model, table, state)
            ENTROPY_BOUND.step(work.statistics, table, state, own, runner.canvases)

        return {
            "embed": lambda: model.embed(runner.canvases.tokens, work.rows, table, runner.signal, state.step),
            "self-conditioning": lambda: work.condition(model, table, state, runner.signal),
            "attention": self._attention,
            "dense": every_layer(lambda layer: model.dense(layer, work.rows)),
            "router": every_layer(lambda layer: model.route(layer, work.rows)),
            "experts": every_layer(self._experts),
            "norms": every_layer(self._norms),
            "head": lambda: work.head(model),
            "sampling": sampling,
        }

    def _attention(self) -> None:
        for index in range(len(self.model.layers)):
            self.model.attention(index, self._pass.rows, self.runner.arena, self._table, causal=False)

    def _experts(self, layer: FusedLayer) -> None:
        b = self._pass.rows
        prepare_rows(b.expert_in, b.experts)
        expert_rows(b.expert_in, b.group_sums, layer.experts, b.assigned, b.experts)

    def _norms(self, layer: FusedLayer) -> None:
        """The two launches of `FusedModel.feed_forward` around its branches."""
        b = self._pass.rows
        self.model.join_attention(layer, b)
        self.model.join_feed_forward(layer, b, self._expert_rows, layer.weights.input_layernorm, causal=False)
