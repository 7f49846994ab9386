"""The network as launches over fixed buffers: what `model.py` computes, fused for a GPU.

Every buffer is allocated before the first pass, and every value that changes from pass to pass is read on the device,
so that a whole pass can be captured as a CUDA graph (`graphs.py`) and replayed. Rows of a pass are [lanes * N, ...]: N
is the canvas length in a denoise pass and the length of a prompt's piece in an encode pass. A slot holds one request;
`slots` int32 [lanes], on the device, says whose rows a pass works on, all distinct.

Per layer: QKV product; norms, rope and K/V into the arena in one launch; attention; output product; residual and the
three pre-norms in one launch; then two branches that a GPU runs side by side, the dense MLP and the router with the
experts; and one launch that sums a token's experts, norms, adds to the residual and norms for the next layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from redraft.config import LayerConfig, ModelConfig, QuantSpec
from redraft.kernels.attention import attend, attention_scratch, attention_settings
from redraft.kernels.attention_canvas import CanvasScratch, attend_canvas, canvas_scratch, canvas_settings
from redraft.kernels.experts import expert_buffers, expert_products, expert_rows, prepare_rows
from redraft.kernels.experts_layout import TILE_ROWS, gemm_tiles, repack
from redraft.kernels.kv_write import advance, commit_rows
from redraft.kernels.mlp import gated_into, gated_product_into, product_into, products_fit
from redraft.kernels.norms import combine_norms, embed_norms, residual_norms
from redraft.kernels.products import Products
from redraft.kernels.rope import inverse_frequencies, qkv_norm_rope
from redraft.kernels.router import route_into, router_scratch
from redraft.kernels.sampling import Statistics, probabilities, sample
from redraft.kernels.self_conditioning import SelfConditioningBuffers, self_condition
from redraft.kernels.slots import assign_slots, counts_scratch, empty_slots
from redraft.kernels.state import SlotState
from redraft.kernels.tables import H200, current_gpu, settings_for
from redraft.network.arena import SlotArena
from redraft.network.weights import (
    DenseExperts,
    LayerWeights,
    PackedExperts,
    RepackedExperts,
    SelfConditioningWeights,
    Weights,
)


@dataclass
class FusedLayer:
    """A layer's weights as the fused pass reads them."""

    config: LayerConfig
    weights: LayerWeights
    qkv: torch.Tensor  # [(heads + 2 kv_heads) * D, H], full layers without V
    gate_up: torch.Tensor  # [2I, H] of the dense MLP
    experts: DenseExperts | RepackedExperts
    inv_freq: torch.Tensor  # fp32 [D / 2]


class FusedModel:
    """The network of a checkpoint in BF16, ready for fused passes.

    Takes `weights` over, layer by layer and without a second copy of the network: experts change to the layout of the
    kernels, and projections of one input become views of one tensor, so that whoever holds them goes on working.
    """

    def __init__(self, config: ModelConfig, weights: Weights, spec: QuantSpec | None):
        self.config, self.weights, self.spec = config, weights, spec
        self.device = weights.embed.device
        self.embed_scale = float(torch.tensor(config.hidden_size**0.5, dtype=torch.bfloat16))
        self.layers = [self._prepare(layer, w) for layer, w in zip(config.layers, weights.layers, strict=True)]
        self.conditioning_gate_up = _join(weights.self_conditioning, ["gate_proj", "up_proj"])
        shapes = (config.hidden_size, config.moe_intermediate_size)
        self.expert_products = expert_products(*shapes, spec, self.device) if spec else None
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._shares = products_fit(self.device)
        self.products = Products(config.canvas_length)

    @staticmethod
    def supports(config: ModelConfig, spec: QuantSpec | None) -> bool:
        """Whether the kernels cover these shapes."""
        return spec is None or gemm_tiles(config, spec) is not None

    def _prepare(self, layer: LayerConfig, weights: LayerWeights) -> FusedLayer:
        if isinstance(weights.experts, PackedExperts):
            assert self.spec is not None, "packed experts have group sizes"
            weights.experts = repack(weights.experts, self.config, self.spec)
        return FusedLayer(
            config=layer,
            weights=weights,
            qkv=_join(weights, ["q_proj", "k_proj"] if weights.v_proj is None else ["q_proj", "k_proj", "v_proj"]),
            gate_up=_join(weights, ["gate_proj", "up_proj"]),
            experts=weights.experts,
            inv_freq=inverse_frequencies(layer).to(self.device),
        )

    def embed(
        self, tokens: torch.Tensor, b: Buffers, slots: torch.Tensor | None = None,
        signal: torch.Tensor | None = None, step: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Start a pass: tokens into the residual stream and the first layer's input.

        Without slots an encode pass, tokens int64 [R] by lane. With slots a denoise pass, with self-conditioning's
        post-norm: canvases int64 [S * C], signal [S * C, H] and step int32 [S], by slot, or without a signal.
        """
        embed_norms(
            tokens, self.weights.embed, self.embed_scale, self.config.rms_norm_eps,
            self.weights.layers[0].input_layernorm, normed=slots is not None, x=b.x, next_in=b.next_in,
            slots=slots, signal=signal, step=step,
        )  # fmt: skip

    def run_layers(self, b: Buffers, arena: SlotArena, slots: torch.Tensor, *, causal: bool) -> None:
        """All layers over the rows in `b`; b.next_in is then the final norm's output."""
        norms = [w.input_layernorm for w in self.weights.layers[1:]] + [self.weights.norm]
        for index, (layer, next_weight) in enumerate(zip(self.layers, norms, strict=True)):
            self.attention(index, b, arena, slots, causal=causal)
            self.feed_forward(layer, b, next_weight, causal=causal)

    def attention(self, index: int, b: Buffers, arena: SlotArena, slots: torch.Tensor, *, causal: bool) -> None:
        """From a layer's normed input to b.delta, the attention's output product."""
        layer, kv = self.layers[index], arena.layers[index]
        h, w = b.heads[layer.config.kind], layer.weights
        self.products(b.next_in, layer.qkv.t(), h.qkv)
        qkv_norm_rope(
            h.qkv, w.q_norm, w.k_norm, layer.inv_freq, arena.length, slots, self.config.rms_norm_eps,
            q_out=h.q, keys=kv.keys, values=kv.values, rows_cap=kv.rows_cap,
        )  # fmt: skip
        if h.canvas is not None and not causal:
            attend_canvas(
                h.q, kv.keys, kv.values, arena.length, slots, kv.rows_cap,
                out=h.out, scratch=h.canvas, settings=h.canvas_settings,
            )  # fmt: skip
        else:
            attend(
                h.q, kv.keys, kv.values, arena.length, slots, kv.rows_cap, causal,
                self.config.sliding_window if kv.ring else None,
                out=h.out, scratch=h.scratch, settings=h.settings,
            )  # fmt: skip
        self.products(h.out, w.o_proj.t(), b.delta)

    def feed_forward(self, layer: FusedLayer, b: Buffers, next_weight: torch.Tensor, *, causal: bool) -> None:
        """From b.delta to the residual stream and the next layer's normed input."""
        self.join_attention(layer, b)
        with self._beside():
            self.dense(layer, b)
        # Not on the second stream: there the dense MLP would start later, and the experts find its blocks in their way.
        prepare_rows(b.expert_in, b.experts)
        self.route(layer, b)
        rows = expert_rows(b.expert_in, b.group_sums, layer.experts, b.assigned, b.experts)
        self._rejoin()
        self.join_feed_forward(layer, b, rows, next_weight, causal=causal)

    def join_attention(self, layer: FusedLayer, b: Buffers) -> None:
        """Add the attention's output to the residual stream, and norm it for what follows."""
        w = layer.weights
        residual_norms(
            b.x, b.delta, w.post_attention_layernorm, w.pre_feedforward_layernorm, w.pre_feedforward_layernorm_2,
            w.router_scale, self.config.rms_norm_eps, dense_in=b.dense_in, expert_in=b.expert_in, router_in=b.router_in,
            group_sums=b.group_sums, group_size=b.group,
        )  # fmt: skip

    def join_feed_forward(
        self, layer: FusedLayer, b: Buffers, rows: torch.Tensor, next_weight: torch.Tensor, *, causal: bool
    ) -> None:
        """Add b.dense and the experts' rows [R * k, H] to the residual stream, and norm it for the next layer."""
        w = layer.weights
        combine_norms(
            b.x, b.dense, rows, b.assigned.slot_of, b.routing, w.post_feedforward_layernorm_1,
            w.post_feedforward_layernorm_2, w.post_feedforward_layernorm,
            w.encoder_scalar if causal else w.decoder_scalar, next_weight, self.config.rms_norm_eps, next_in=b.next_in,
        )  # fmt: skip

    def dense(self, layer: FusedLayer, b: Buffers) -> None:
        """The dense MLP: two launches that leave room beside them, or with more than one canvas the library's three."""
        down = layer.weights.down_proj
        if not self._shares:
            self.products(b.dense_in, layer.gate_up.t(), b.gate_up)
            gated_into(b.gate_up, b.inner)
            self.products(b.inner, down.t(), b.dense)
            return

        def together() -> None:
            torch.mm(b.dense_in, layer.gate_up.t(), out=b.gate_up)
            gated_into(b.gate_up, b.inner)
            torch.mm(b.inner, down.t(), out=b.dense)

        def apart(rows: slice) -> None:
            gated_product_into(b.dense_in[rows], layer.gate_up, b.inner[rows])
            product_into(b.inner[rows], down, b.dense[rows])

        self.products.choose(("dense", b.dense_in.shape), b.dense_in, b.dense, together, apart)

    def route(self, layer: FusedLayer, b: Buffers) -> None:
        """Choose every row's experts and put the rows of an expert side by side."""
        w, config = layer.weights, self.config
        route_into(
            b.router_in, w.router_proj, w.per_expert_scale, config.top_k_experts,
            weights=b.routing, experts=b.chosen, scratch=b.router_scratch,
        )  # fmt: skip
        assign_slots(b.chosen, config.num_experts, b.tile_rows, **vars(b.assigned), counts=b.counts)

    def commit(self, arena: SlotArena, slots: torch.Tensor, count: torch.Tensor) -> None:
        """Make the first count[lane] in-flight rows, int32 [lanes], part of every layer's prefix."""
        for kv in arena.layers:
            commit_rows(kv.keys, kv.values, arena.length, slots, count, kv.rows_cap, ring=kv.ring)
        advance(arena.length, slots, count)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Launch on a second stream what does not need the launches that follow."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            yield

    def _rejoin(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)


def _join(weights: LayerWeights | SelfConditioningWeights, names: list[str]) -> torch.Tensor:
    """The named matrices stacked by rows; they become views of the stack, for all that hold them."""
    parts = [getattr(weights, name) for name in names]
    if (joined := stacked(parts)) is None:
        joined = torch.cat(parts)
        for part, view in zip(parts, joined.split([len(part) for part in parts]), strict=True):
            part.data = view
    return joined


def stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The matrices [N_i, K] as one [sum N_i, K] without a copy, or None where they do not follow each other."""
    first = parts[0]
    following, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for part in parts:
        own = part.untyped_storage().data_ptr()
        if part.data_ptr() != following or own != storage or not part.is_contiguous():
            return None
        following += part.nbytes
    return first.detach().as_strided((sum(map(len, parts)), first.shape[1]), first.stride())


class Buffers:
    """Everything a pass over `lanes` x `count` rows writes on its way, allocated once."""

    def __init__(self, model: FusedModel, lanes: int, count: int, device: torch.device | None = None):
        """device: another than the model's, to count bytes without allocating them."""
        config, spec, device = model.config, model.spec, device or model.device
        rows, hidden, top_k = lanes * count, config.hidden_size, config.top_k_experts

        def bf16(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=device)

        self.lanes, self.count = lanes, count
        self.x, self.next_in, self.delta, self.dense = (bf16(rows, hidden) for _ in range(4))
        self.dense_in, self.expert_in, self.router_in = (bf16(rows, hidden) for _ in range(3))
        self.gate_up, self.inner = bf16(rows, 2 * config.intermediate_size), bf16(rows, config.intermediate_size)
        # BF16 experts do not read the group sums; any group that tiles a row will do.
        self.group = spec.group_gate_up if spec else math.gcd(hidden, 128)
        self.group_sums = torch.empty(rows, hidden // self.group, dtype=torch.float32, device=device)
        self.routing = torch.empty(rows, top_k, dtype=torch.float32, device=device)
        self.chosen = torch.empty(rows, top_k, dtype=torch.int32, device=device)
        self.experts = None
        if spec is not None:
            width, products = config.moe_intermediate_size, model.expert_products
            self.experts = expert_buffers(rows, top_k, config.num_experts, hidden, width, spec, device, products)
        self.tile_rows = self.experts.tile_rows if self.experts else TILE_ROWS
        self.assigned = empty_slots(rows, top_k, config.num_experts, self.tile_rows, device)
        self.counts = counts_scratch(rows, top_k, config.num_experts, device)
        self.router_scratch = router_scratch(rows, hidden, config.num_experts, device)
        kinds = {layer.kind: layer for layer in config.layers}
        self.heads = {kind: HeadBuffers(config, layer, lanes, count, device) for kind, layer in kinds.items()}


class HeadBuffers:
    """Attention buffers of one kind of layer: kinds differ in the number and size of their heads."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, lanes: int, count: int, device: torch.device):
        heads, kv, dim = config.num_heads, layer.num_kv_heads, layer.head_dim
        parts = heads + (2 * kv if layer.kind == "sliding" else kv)
        self.qkv = torch.empty(lanes * count, parts * dim, dtype=torch.bfloat16, device=device)
        self.q = torch.empty(lanes, heads, count, dim, dtype=torch.bfloat16, device=device)
        self.out = torch.empty(lanes * count, heads * dim, dtype=torch.bfloat16, device=device)
        gpu, shape = current_gpu() or H200, (lanes, heads, kv, count, dim)
        name = f"attention.{layer.kind}" if count > 1 else "attention.step"  # one row a lane has tiles of its own
        self.settings = settings_for(name, attention_settings(*shape, gpu), gpu, fit=False)
        self.scratch = attention_scratch(lanes, heads, count, dim, self.settings, device)
        self.canvas_settings = settings_for("attention_canvas", canvas_settings(*shape, gpu), gpu, fit=False)
        self.canvas: CanvasScratch | None = None

    def plan_canvases(self, rows_cap: int) -> None:
        """Scratch for the faster attention of denoise passes over prefixes of at most rows_cap stored rows."""
        lanes, heads, count, _ = self.q.shape
        self.canvas = canvas_scratch(lanes, heads, count, rows_cap, self.canvas_settings, self.q.device)


class DenoisePass:
    """Denoise passes of a fixed number of lanes: what they write besides the slots' state, and their launches.

    Between passes a slot has its canvas in `tokens` int64 [S * C], its self-conditioning in `signal` [S * C, H], and
    its place and temperature in `state`; a rule moves them by `statistics`.
    """

    def __init__(self, model: FusedModel, rows: Buffers, capacity: int, logits: torch.Tensor):
        """rows: buffers for [lanes, C]; capacity: positions a slot can hold; logits BF16 [lanes * C, V], scratch."""
        config, device, count = model.config, logits.device, logits.shape[0]
        self.rows, self.logits = rows, logits
        if "full" in rows.heads:
            rows.heads["full"].plan_canvases(capacity)
        self.conditioning = SelfConditioningBuffers.allocate(
            count, config.hidden_size, config.intermediate_size, torch.bfloat16, device
        )
        draw, argmax = (torch.zeros(rows.lanes, rows.count, dtype=torch.int64, device=device) for _ in range(2))
        entropy, confidence = (torch.zeros(rows.lanes, rows.count, device=device) for _ in range(2))
        self.statistics = Statistics(draw, argmax, entropy, confidence)
        self.log_norm = torch.zeros(count, device=device)

    def run(
        self, model: FusedModel, slots: torch.Tensor, arena: SlotArena, state: SlotState, tokens: torch.Tensor,
        signal: torch.Tensor,
    ) -> None:  # fmt: skip
        """One pass of the slots in `slots` int32 [lanes], to their statistics and the next pass's signal."""
        model.embed(tokens, self.rows, slots, signal, state.step)
        model.run_layers(self.rows, arena, slots, causal=False)
        self.head(model)
        self.sample(model, slots, state)
        self.condition(model, slots, state, signal)

    def head(self, model: FusedModel) -> None:
        """Raw logits of the last layer's output."""
        model.products(self.rows.next_in, model.weights.embed.t(), self.logits)

    def sample(self, model: FusedModel, slots: torch.Tensor, state: SlotState) -> None:
        """From the raw logits to statistics and, in their place, probabilities."""
        cap, stats = model.config.final_logit_softcap, self.statistics
        sample(
            self.logits, state, slots, cap, draw=stats.draw.view(-1), argmax=stats.argmax.view(-1),
            entropy=stats.entropy.view(-1), confidence=stats.confidence.view(-1), log_norm=self.log_norm,
        )  # fmt: skip
        probabilities(self.logits, self.log_norm, state, slots, cap, out=self.logits)

    def condition(self, model: FusedModel, slots: torch.Tensor, state: SlotState, signal: torch.Tensor) -> None:
        """From probabilities to the signal of the next pass."""
        self_condition(
            self.logits, model.weights.embed, model.weights.self_conditioning, model.conditioning_gate_up, state.done,
            slots, model.embed_scale, model.config.rms_norm_eps, self.conditioning, signal, model.products,
        )  # fmt: skip
