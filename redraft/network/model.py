"""DiffusionGemma: two passes over one stack of layers.

`encode` reads tokens causally and writes their keys and values into the arena. `denoise` reads a canvas
bidirectionally, attends to the arena without changing it, and predicts every position of the clean canvas. The passes
share all weights but the per-layer output scalar; only denoise has self-conditioning.
"""

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

Extend = Callable[[torch.Tensor, torch.Tensor], KV]  # from a layer's new keys and values to all that it attends to


class Model:
    """The network over plain tensors. All methods run without gradients on the weights' device and dtype."""

    def __init__(self, config: ModelConfig, weights: Weights):
        self.config, self.weights = config, weights
        self.device, self.dtype = weights.embed.device, weights.embed.dtype
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
            mask = _causal_mask(arena, cache, tokens)
            x = self._layer(x, layer, weights, tables[layer.kind], mask, cache.extend, weights.encoder_scalar)
        arena.advance(tokens.shape[1])
        return self._norm(x, self.weights.norm)

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
            mask = _padding_mask(arena, cache, canvas)
            x = self._layer(x, layer, weights, tables[layer.kind], mask, cache.with_own, weights.decoder_scalar)
        return self.head(self._norm(x, self.weights.norm))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """cap * tanh(hidden @ embed^T / cap), fp32 [..., V]."""
        cap = self.config.final_logit_softcap
        return torch.tanh(F.linear(hidden, self.weights.embed).float() / cap) * cap

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weights.embed) * self.embed_scale

    def _self_condition(self, x: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
        """post_norm(x + mlp(pre_norm(soft))), soft = softmax(logits) @ E * sqrt(H), or zero on the first pass."""
        weights = self.weights.self_conditioning
        if logits is None:
            return self._norm(x, None)  # a gated MLP of zeros is zero
        probs = logits.softmax(dim=-1, dtype=torch.float32).to(self.dtype)
        soft = torch.matmul(probs, self.weights.embed) * self.embed_scale
        normed = self._norm(soft, weights.pre_norm)
        return self._norm(x + gated_mlp(normed, weights.gate_proj, weights.up_proj, weights.down_proj), None)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps)

    def _rope_tables(self, start: int, count: int) -> dict[str, Table]:
        positions = torch.arange(start, start + count, device=self.device)
        return {kind: rope_table(freq, positions, self.dtype) for kind, freq in self._inv_freq.items()}

    def _layer(
        self, x: torch.Tensor, layer: LayerConfig, weights: LayerWeights, table: Table, mask: torch.Tensor | None,
        extend: Extend, scalar: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        attended = self._attention(self._norm(x, weights.input_layernorm), layer, weights, table, mask, extend)
        x = x + self._norm(attended, weights.post_attention_layernorm)
        return (x + self._norm(self._feed_forward(x, weights), weights.post_feedforward_layernorm)) * scalar

    def _attention(
        self, x: torch.Tensor, layer: LayerConfig, weights: LayerWeights, table: Table, mask: torch.Tensor | None,
        extend: Extend,
    ) -> torch.Tensor:  # fmt: skip
        q = F.linear(x, weights.q_proj).unflatten(-1, (-1, layer.head_dim))
        k = F.linear(x, weights.k_proj).unflatten(-1, (-1, layer.head_dim))
        v = k if weights.v_proj is None else F.linear(x, weights.v_proj).unflatten(-1, (-1, layer.head_dim))
        q = rotate(self._norm(q, weights.q_norm), table).transpose(1, 2)
        k = rotate(self._norm(k, weights.k_norm), table).transpose(1, 2)
        v = self._norm(v, None).transpose(1, 2)
        return F.linear(attention(q, *extend(k, v), mask), weights.o_proj)

    def _feed_forward(self, x: torch.Tensor, w: LayerWeights) -> torch.Tensor:
        """Dense MLP and routed experts, side by side on differently normed copies of one residual."""
        dense = gated_mlp(self._norm(x, w.pre_feedforward_layernorm), w.gate_proj, w.up_proj, w.down_proj)
        flat, top_k, eps = x.flatten(0, -2), self.config.top_k_experts, self.config.rms_norm_eps
        routing, index = route(flat, w.router_proj, w.router_scale, w.per_expert_scale, top_k, eps)
        routed = run_experts(self._norm(flat, w.pre_feedforward_layernorm_2), w.experts, routing, index).view_as(x)
        return self._norm(dense, w.post_feedforward_layernorm_1) + self._norm(routed, w.post_feedforward_layernorm_2)


def _causal_mask(arena: KVArena, cache: LayerCache, tokens: torch.Tensor) -> torch.Tensor:
    """bool [1 or B, 1, N, keys] for tokens [B, N]: at or before the query, inside the window, not padding."""
    end = arena.length + tokens.shape[1]
    keys = torch.arange(arena.length - cache.rows, end, device=tokens.device)
    queries = torch.arange(arena.length, end, device=tokens.device)[:, None]
    visible = keys <= queries
    if cache.window is not None:
        visible = visible & (queries - keys < cache.window)
    visible = visible[None, None]
    if arena.padding is not None:
        # A padding row sees itself, so that its (unread) output stays finite.
        visible = visible & ((keys >= arena.padding[:, None, None, None]) | (keys == queries))
    return visible


def _padding_mask(arena: KVArena, cache: LayerCache, canvas: torch.Tensor) -> torch.Tensor | None:
    """bool [B, 1, 1, keys] hiding left padding from a canvas [B, C], or None when there is none."""
    if arena.padding is None:
        return None
    first = arena.length - cache.prefix()[0].shape[2]
    positions = torch.arange(first, arena.length + canvas.shape[1], device=canvas.device)
    return (positions >= arena.padding[:, None])[:, None, None, :]
