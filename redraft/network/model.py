"""DiffusionGemma: two passes over one stack of layers.

`encode` reads tokens causally and writes their keys and values into the arena. `denoise` reads a canvas
bidirectionally, attends to the arena without changing it, and predicts every position of the clean canvas. The passes
share all weights but the per-layer output scalar; only denoise has self-conditioning.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from redraft.config import LayerConfig, ModelConfig
from redraft.kernels.experts import run_experts
from redraft.kernels.mlp import gated_mlp
from redraft.kernels.norms import rms_norm
from redraft.kernels.products import linear
from redraft.kernels.rope import Table, inverse_frequencies, rope_table, rotate
from redraft.kernels.router import route
from redraft.kernels.weights import SelfConditioningWeights
from redraft.network.arena import Arena
from redraft.network.weights import LayerWeights, Weights

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # see KVArena.attend


class Model:
    """The network over plain tensors. All methods run without gradients on the weights' device and dtype.

    batch_invariant: on a CPU a row's bits do not depend on the other rows of a pass (kernels/products.py), which must
    have a multiple of ROW_MULTIPLE rows.
    """

    def __init__(self, config: ModelConfig, weights: Weights, *, batch_invariant: bool = False):
        self.config, self.weights, self.batch_invariant = config, weights, batch_invariant
        self.device, self.dtype = weights.embed.device, weights.embed.dtype
        self._linear = partial(linear, batch_invariant=batch_invariant)
        self.embed_scale = torch.tensor(config.hidden_size**0.5, dtype=self.dtype, device=self.device)
        self._inv_freq = {layer.kind: inverse_frequencies(layer).to(self.device) for layer in config.layers}

    @torch.no_grad()
    def encode(self, tokens: torch.Tensor, arena: Arena) -> torch.Tensor:
        """Causal pass: append tokens int64 [B, N] to the arena.

        Returns the final normed hidden states [B, N, H]; `head` turns them into next-token logits.
        """
        hidden = self._layers(self._embed(tokens), arena, causal=True)
        arena.advance(tokens.shape[1])
        return hidden

    @torch.no_grad()
    def denoise(
        self, canvas: torch.Tensor, arena: Arena, self_conditioning: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Bidirectional pass over canvas int64 [B, C] and the arena, which stays as it is.

        self_conditioning: the previous pass's temperature-scaled logits [B, C, V], None on the first pass; if they are
        of the first positions only, the others are on their first pass. Returns soft-capped logits fp32 [B, C, V].
        """
        x = self._self_condition(self._embed(canvas), self_conditioning)
        return self.head(self._layers(x, arena, causal=False))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """cap * tanh(hidden @ embed^T / cap), fp32 [..., V]."""
        cap = self.config.final_logit_softcap
        return torch.tanh(self._linear(hidden, self.weights.embed).float() / cap) * cap

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weights.embed) * self.embed_scale

    def _self_condition(self, x: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
        """post_norm(x + mlp(pre_norm(soft))), soft = softmax(logits) @ E * sqrt(H), or zero on the first pass."""
        weights = self.weights.self_conditioning
        if logits is not None:  # a gated MLP of zeros is zero
            probs = logits.softmax(dim=-1, dtype=torch.float32).to(self.dtype)
            soft = self._linear(probs, self.weights.embed.T) * self.embed_scale
            signal = self._mlp(self._norm(soft, weights.pre_norm), weights)
            first = signal.shape[1]
            x = torch.cat((x[:, :first] + signal, x[:, first:]), dim=1)
        return self._norm(x, None)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps)

    def _mlp(self, x: torch.Tensor, weights: LayerWeights | SelfConditioningWeights) -> torch.Tensor:
        return gated_mlp(x, weights.gate_proj, weights.up_proj, weights.down_proj, self.batch_invariant)

    def _layers(self, x: torch.Tensor, arena: Arena, *, causal: bool) -> torch.Tensor:
        """All layers and the last norm."""
        tables = self._rope_tables(arena.positions(x.shape[1]))
        for index, (layer, weights) in enumerate(zip(self.config.layers, self.weights.layers, strict=True)):
            attend = partial(arena.attend, index, causal=causal)
            scalar = weights.encoder_scalar if causal else weights.decoder_scalar
            x = self._layer(x, layer, weights, tables[layer.kind], attend, scalar)
        return self._norm(x, self.weights.norm)

    def _rope_tables(self, positions: torch.Tensor) -> dict[str, Table]:
        return {kind: rope_table(freq, positions, self.dtype) for kind, freq in self._inv_freq.items()}

    def _layer(
        self, x: torch.Tensor, layer: LayerConfig, weights: LayerWeights, table: Table, attend: Attend,
        scalar: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        attended = self._attention(self._norm(x, weights.input_layernorm), layer, weights, table, attend)
        x = x + self._norm(attended, weights.post_attention_layernorm)
        return (x + self._norm(self._feed_forward(x, weights), weights.post_feedforward_layernorm)) * scalar

    def _attention(
        self, x: torch.Tensor, layer: LayerConfig, weights: LayerWeights, table: Table, attend: Attend
    ) -> torch.Tensor:
        q = self._linear(x, weights.q_proj).unflatten(-1, (-1, layer.head_dim))
        k = self._linear(x, weights.k_proj).unflatten(-1, (-1, layer.head_dim))
        v = k if weights.v_proj is None else self._linear(x, weights.v_proj).unflatten(-1, (-1, layer.head_dim))
        q = rotate(self._norm(q, weights.q_norm), table).transpose(1, 2)
        k = rotate(self._norm(k, weights.k_norm), table).transpose(1, 2)
        v = self._norm(v, None).transpose(1, 2)
        return self._linear(attend(q, k, v), weights.o_proj)

    def _feed_forward(self, x: torch.Tensor, w: LayerWeights) -> torch.Tensor:
        """Dense MLP and routed experts, side by side on differently normed copies of one residual."""
        dense = self._mlp(self._norm(x, w.pre_feedforward_layernorm), w)
        flat, top_k, eps = x.flatten(0, -2), self.config.top_k_experts, self.config.rms_norm_eps
        router = (w.router_proj, w.router_scale, w.per_expert_scale)
        routing, index = route(flat, *router, top_k, eps, self.batch_invariant)
        expert_in = self._norm(flat, w.pre_feedforward_layernorm_2)
        routed = run_experts(expert_in, w.experts, routing, index, self.batch_invariant).view_as(x)
        return self._norm(dense, w.post_feedforward_layernorm_1) + self._norm(routed, w.post_feedforward_layernorm_2)
