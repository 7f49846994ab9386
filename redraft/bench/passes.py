"""Denoising passes as benchmarks run them: the interface, those of the reference network, and the captured ones."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch

from redraft.config import DecodeSettings
from redraft.decode.entropy_bound import ENTROPY_BOUND
from redraft.decode.streams import CounterStream
from redraft.engine.eager import Rows
from redraft.engine.graphs import GraphRunner
from redraft.engine.runner import admit_prompts
from redraft.kernels.experts import expert_rows, prepare_rows, run_experts
from redraft.kernels.mlp import gated_mlp
from redraft.kernels.norms import rms_norm
from redraft.kernels.router import route
from redraft.network.arena import KVArena
from redraft.network.fused import FusedLayer, FusedModel
from redraft.network.model import Model
from redraft.network.weights import LayerWeights

# A canvas never runs out of passes, its temperature stays at t_max, and no entropy is low enough to stop.
ENDLESS_SETTINGS = DecodeSettings(max_denoising_steps=10**9, confidence_threshold=1e-30)

Parts = Mapping[str, Callable[[], object]]


def random_tokens(vocab: int, shape: tuple[int, int], seed: int, device: torch.device) -> torch.Tensor:
    """The prompts of a benchmark, the same for every implementation on one device."""
    return torch.randint(vocab, shape, generator=torch.Generator(device).manual_seed(seed), device=device)


class DenoiseStep(Protocol):
    """Denoising passes of a batch over fixed buffers.

    Prepared with `batch` prompts of random tokens encoded and one pass done, so that self-conditioning is in use. The
    number of passes is unlimited and none of them stops early.
    """

    name: str  # of the implementation, for the table
    capturable: bool  # whether each of `parts` may be captured as a CUDA graph

    def run_pass(self) -> object:
        """One whole pass, sampling included, as generation runs it; may return before the device is done."""

    def run_encode(self) -> object:
        """Encode the same prompts once more from the start; the canvases may begin anew."""

    def parts(self) -> Parts:
        """Every part of a pass (`work.PARTS`), all its layers, over the present buffers, whatever they hold."""


class ReferenceStep:
    """Passes of `redraft.network.model.Model`, decoded by the entropy bound."""

    name = "reference"
    capturable = False  # the experts' loop reads its counts on the host

    def __init__(self, model: Model, batch: int, prompt_tokens: int, seed: int):
        self.model, self.config = model, model.config
        self.prompt = random_tokens(self.config.vocab_size, (batch, prompt_tokens), seed, model.device)
        self.arena = self.run_encode()
        stream = CounterStream(list(range(batch)), self.config.canvas_length, self.config.vocab_size, model.device)
        self.rows = Rows(model, ENTROPY_BOUND, ENDLESS_SETTINGS, stream, self.arena)
        self.rows.start()
        self.run_pass()

    def run_pass(self) -> None:
        self.rows.run_pass()

    def run_encode(self) -> KVArena:
        batch, length = self.prompt.shape
        arena = KVArena(self.config, batch, length, self.model.dtype, self.model.device)
        self.model.encode(self.prompt, arena)
        return arena

    def parts(self) -> Parts:
        """The network's own pieces, fed with this canvas's embeddings in every layer."""
        model, config, rows = self.model, self.config, self.rows
        layers, last_norm, eps = model.weights.layers, model.weights.norm, config.rms_norm_eps
        x = model._embed(rows.canvas)
        flat = x.flatten(0, -2)
        hidden = rms_norm(x, last_norm, eps)
        logits = model.head(hidden)

        def routed(w: LayerWeights) -> tuple[torch.Tensor, torch.Tensor]:
            return route(flat, w.router_proj, w.router_scale, w.per_expert_scale, config.top_k_experts, eps)

        def norms(w: LayerWeights) -> None:
            for weight in (w.input_layernorm, w.post_attention_layernorm, w.pre_feedforward_layernorm,
                           w.post_feedforward_layernorm_1, w.pre_feedforward_layernorm_2,
                           w.post_feedforward_layernorm_2, w.post_feedforward_layernorm):  # fmt: skip
                rms_norm(x, weight, eps)
            torch.add(x, x)
            torch.add(x, x).mul_(w.decoder_scalar)

        routes = [routed(w) for w in layers]
        return {
            "embed": lambda: model._embed(rows.canvas),
            "self-conditioning": lambda: model._self_condition(x, rows.self_conditioning),
            "attention": lambda: self._attention(x),
            "dense": lambda: [gated_mlp(x, w.gate_proj, w.up_proj, w.down_proj) for w in layers],
            "router": lambda: [routed(w) for w in layers],
            "experts": lambda: [run_experts(flat, w.experts, *route) for w, route in zip(layers, routes, strict=True)],
            "norms": lambda: [*map(norms, layers), rms_norm(x, last_norm, eps)],
            "head": lambda: model.head(hidden),
            "sampling": lambda: rows.take(logits),
        }

    def _attention(self, x: torch.Tensor) -> None:
        model = self.model
        tables = model._rope_tables(self.arena.positions(x.shape[1]))
        for index, (layer, w) in enumerate(zip(self.config.layers, model.weights.layers, strict=True)):
            model._attention(x, layer, w, tables[layer.kind], partial(self.arena.attend, index, causal=False))


class FusedStep:
    """Captured passes of a batch in the first of the slots of a `graphs.GraphRunner`."""

    name = "fused"
    capturable = True

    def __init__(self, model: FusedModel, batch: int, prompt_tokens: int, seed: int, slots: int = 0):
        self.model, config = model, model.config
        self.prompts = random_tokens(config.vocab_size, (batch, prompt_tokens), seed, model.device).tolist()
        self.runner = GraphRunner(model, max(slots, batch), prompt_tokens)
        self.slots = list(range(batch))
        width = min(width for width in self.runner.work.passes if width >= batch)
        self._pass, self._table = self.runner.work.passes[width], self.runner.work.lanes[width].table
        b = self._pass.rows
        # BF16 experts return a new tensor from every call: another of its shape serves for timing what follows.
        self._expert_rows = b.experts.out if b.experts else b.x.repeat_interleave(config.top_k_experts, dim=0)
        self.run_encode()
        self.run_pass()

    def run_pass(self) -> object:
        self.runner.run_pass(self.slots)
        return self.runner.poll()

    def run_encode(self) -> None:
        self.runner.reset()
        admit_prompts(self.runner, self.prompts, ENTROPY_BOUND, ENDLESS_SETTINGS)
        self.runner.start(self.slots)

    def parts(self) -> Parts:
        """The launches of a pass by part; norms that end another launch (of the embedding, of q and k) stay there."""
        model, runner, work, table = self.model, self.runner, self._pass, self._table
        state, own, b = runner.state, runner.own(ENTROPY_BOUND), work.rows

        def every_layer(call: Callable[[FusedLayer], object]) -> Callable[[], object]:
            return lambda: [call(layer) for layer in model.layers]

        def attention() -> None:
            for index in range(len(model.layers)):
                model.attention(index, b, runner.arena, table, causal=False)

        def experts(layer: FusedLayer) -> None:
            prepare_rows(b.expert_in, b.experts)
            expert_rows(b.expert_in, b.group_sums, layer.experts, b.assigned, b.experts)

        def norms(layer: FusedLayer) -> None:
            """The two launches of `FusedModel.feed_forward` around its branches."""
            model.join_attention(layer, b)
            model.join_feed_forward(layer, b, self._expert_rows, layer.weights.input_layernorm, causal=False)

        def sampling() -> None:
            work.sample(model, table, state)
            ENTROPY_BOUND.step(work.statistics, table, state, own, runner.canvases)

        return {
            "embed": lambda: model.embed(runner.canvases.tokens, b, table, runner.signal, state.step),
            "self-conditioning": lambda: work.condition(model, table, state, runner.signal),
            "attention": attention,
            "dense": every_layer(lambda layer: model.dense(layer, b)),
            "router": every_layer(lambda layer: model.route(layer, b)),
            "experts": every_layer(experts),
            "norms": every_layer(norms),
            "head": lambda: work.head(model),
            "sampling": sampling,
        }
