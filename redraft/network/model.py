"""DiffusionGemma: two passes over one stack of layers.

`encode` reads tokens causally and writes their keys and values into the arena. `denoise` reads a canvas
bidirectionally, attends to the arena without changing it, and predicts every position of the clean canvas. The passes
share all weights but the per-layer output scalar; only denoise has self-conditioning.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from redraft.config import LayerConfig, ModelConfig
from redraft.kernels.attention import attention
from redraft.kernels.experts import run_experts
from redraft.kernels.mlp import gated_mlp
from redraft.kernels.norms import rms_norm
from redraft.kernels.rope import Table, inverse_frequencies, rope_table, rotate
from redraft.kernels.router import route
from redraft.network.arena import KV, KVArena, LayerCache
from redraft.network.weights import LayerWeights, Weights


class Model:
    """The network over plain tensors. All methods run without gradients on the weights' device and dtype."""

    def __init__(self, config: ModelConfig, weights: Weights):
        self.config = config
        self.weights = weights
        self.device = weights.embed.device
        self.dtype = weights.embed.dtype
        self.embed_scale = torch.tensor(config.hidden_size**0.5, dtype=self.dtype, device=self.device)
        self._inv_freq = {layer.kind: inverse_frequencies(layer).to(self.device) for layer in config.layers}

    @torch.no_grad()
    def encode(self, tokens: torch.Tensor, arena: KVArena) -> torch.Tensor:
        """Causal pass: append tokens int64 [B, N] to the arena.

        Returns the final normed hidden states [B, N, H]; `head` turns them into next-token logits.
        """
        x = self._embed(tokens)
        tables = self._rope_tables(arena.length, tokens.shape[1])
        for layer, weights, cache in zip(self.config.layers, self.weights.layers, arena.layers, strict=True):
            first_key = arena.length - cache.rows
            mask = _causal_mask(arena, layer, first_key, tokens.shape[1], self.config.sliding_window, self.device)
            x = self._layer(x, layer, weights, tables[layer.kind], mask, cache.extend, weights.encoder_scalar)
        arena.advance(tokens.shape[1])
        return rms_norm(x, self.weights.norm, self.config.rms_norm_eps)

    @torch.no_grad()
    def denoise(
        self, canvas: torch.Tensor, arena: KVArena, self_conditioning: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Bidirectional pass over canvas int64 [B, C] and the arena, which stays as it is.

        self_conditioning: the previous pass's temperature-scaled logits [B, C, V], None on the first pass.
        Returns soft-capped logits fp32 [B, C, V].
        """
        x = self._self_condition(self._embed(canvas), self_conditioning)
        tables = self._rope_tables(arena.length, canvas.shape[1])
        for layer, weights, cache in zip(self.config.layers, self.weights.layers, arena.layers, strict=True):
            keys_seen = cache.prefix()[0].shape[2]
            mask = _padding_mask(arena, arena.length - keys_seen, keys_seen + canvas.shape[1], self.device)
            attend = _reader(cache)
            x = self._layer(x, layer, weights, tables[layer.kind], mask, attend, weights.decoder_scalar)
        return self.head(rms_norm(x, self.weights.norm, self.config.rms_norm_eps))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """cap * tanh(hidden @ embed^T / cap), fp32 [..., V]."""
        cap = self.config.final_logit_softcap
        return torch.tanh(F.linear(hidden, self.weights.embed).float() / cap) * cap

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weights.embed) * self.embed_scale

    def _self_condition(self, x: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
        """post_norm(x + mlp(pre_norm(soft))), soft = softmax(logits) @ E * sqrt(H), or zero on the first pass."""
        weights, eps = self.weights.self_conditioning, self.config.rms_norm_eps
        if logits is None:
            return rms_norm(x, None, eps)  # a gated MLP of zeros is zero
        probs = logits.softmax(dim=-1, dtype=torch.float32).to(self.dtype)
        soft = torch.matmul(probs, self.weights.embed) * self.embed_scale
        normed = rms_norm(soft, weights.pre_norm, eps)
        return rms_norm(x + gated_mlp(normed, weights.gate_proj, weights.up_proj, weights.down_proj), None, eps)

    def _rope_tables(self, start: int, count: int) -> dict[str, Table]:
        positions = torch.arange(start, start + count, device=self.device)
        return {kind: rope_table(freq, positions, self.dtype) for kind, freq in self._inv_freq.items()}

    def _layer(
        self,
        x: torch.Tensor,
        layer: LayerConfig,
        weights: LayerWeights,
        table: Table,
        mask: torch.Tensor | None,
        extend: Callable[[torch.Tensor, torch.Tensor], KV],
        scalar: torch.Tensor,
    ) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        attended = self._attention(rms_norm(x, weights.input_layernorm, eps), layer, weights, table, mask, extend)
        x = x + rms_norm(attended, weights.post_attention_layernorm, eps)
        return (x + rms_norm(self._feed_forward(x, weights), weights.post_feedforward_layernorm, eps)) * scalar

    def _attention(
        self,
        x: torch.Tensor,
        layer: LayerConfig,
        weights: LayerWeights,
        table: Table,
        mask: torch.Tensor | None,
        extend: Callable[[torch.Tensor, torch.Tensor], KV],
    ) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        q = F.linear(x, weights.q_proj).unflatten(-1, (-1, layer.head_dim))
        k = F.linear(x, weights.k_proj).unflatten(-1, (-1, layer.head_dim))
        v = k if weights.v_proj is None else F.linear(x, weights.v_proj).unflatten(-1, (-1, layer.head_dim))
        q = rotate(rms_norm(q, weights.q_norm, eps), table).transpose(1, 2)
        k = rotate(rms_norm(k, weights.k_norm, eps), table).transpose(1, 2)
        v = rms_norm(v, None, eps).transpose(1, 2)
        return F.linear(attention(q, *extend(k, v), mask), weights.o_proj)

    def _feed_forward(self, x: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        """Dense MLP and routed experts, side by side on differently normed copies of one residual."""
        eps = self.config.rms_norm_eps
        dense_in = rms_norm(x, weights.pre_feedforward_layernorm, eps)
        dense = gated_mlp(dense_in, weights.gate_proj, weights.up_proj, weights.down_proj)
        flat = x.flatten(0, -2)
        routing, index = route(
            flat, weights.router_proj, weights.router_scale, weights.per_expert_scale, self.config.top_k_experts, eps
        )
        routed = run_experts(rms_norm(flat, weights.pre_feedforward_layernorm_2, eps), weights.experts, routing, index)
        return rms_norm(dense, weights.post_feedforward_layernorm_1, eps) + rms_norm(
            routed.view_as(x), weights.post_feedforward_layernorm_2, eps
        )


def _reader(cache: LayerCache) -> Callable[[torch.Tensor, torch.Tensor], KV]:
    """Stored rows followed by the canvas's own; the cache is left alone."""

    def extend(keys: torch.Tensor, values: torch.Tensor) -> KV:
        prefix_keys, prefix_values = cache.prefix()
        return torch.cat((prefix_keys, keys), dim=2), torch.cat((prefix_values, values), dim=2)

    return extend


def _causal_mask(
    arena: KVArena, layer: LayerConfig, first_key: int, count: int, window: int, device: torch.device
) -> torch.Tensor:
    """bool [1 or B, 1, count, keys]: at or before the query, inside the window, not padding."""
    keys = torch.arange(first_key, arena.length + count, device=device)
    queries = torch.arange(arena.length, arena.length + count, device=device)[:, None]
    visible = keys <= queries
    if layer.kind == "sliding":
        visible = visible & (queries - keys < window)
    visible = visible[None, None]
    if arena.padding is not None:
        # A padding row sees itself, so that its (unread) output stays finite.
        visible = visible & ((keys >= arena.padding[:, None, None, None]) | (keys == queries))
    return visible


def _padding_mask(arena: KVArena, first_key: int, keys: int, device: torch.device) -> torch.Tensor | None:
    """bool [B, 1, 1, keys] hiding left padding, or None when there is none."""
    if arena.padding is None:
        return None
    positions = torch.arange(first_key, first_key + keys, device=device)
    return (positions >= arena.padding[:, None])[:, None, None, :]
