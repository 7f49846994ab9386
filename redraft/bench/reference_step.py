"""The passes of the reference network as a benchmark runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from redraft.bench.passes import ENDLESS_SETTINGS, random_tokens
from redraft.decode.entropy_bound import ENTROPY_BOUND
from redraft.decode.streams import CounterStream
from redraft.engine.eager import Rows
from redraft.kernels.experts import run_experts
from redraft.kernels.mlp import gated_mlp
from redraft.kernels.norms import rms_norm
from redraft.kernels.router import route
from redraft.network.arena import KVArena
from redraft.network.model import Model
from redraft.network.weights import LayerWeights


class ReferenceStep:
    """Passes of `redraft.network.model.Model`, decoded by the entropy bound; implements `passes.DenoiseStep`."""

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

    def run_pass(self) -> object:
        self.rows.run_pass()
        return None

    def run_encode(self) -> KVArena:
        model = self.model
        batch, length = self.prompt.shape
        arena = KVArena(self.config, batch, length, model.dtype, model.device)
        model.encode(self.prompt, arena)
        return arena

    def parts(self) -> Mapping[str, Callable[[], Any]]:
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
        model, config = self.model, self.config
        tables = model._rope_tables(self.arena.positions(x.shape[1]))
        for index, (layer, w) in enumerate(zip(config.layers, model.weights.layers, strict=True)):
            model._attention(x, layer, w, tables[layer.kind], partial(self.arena.attend, index, causal=False))
