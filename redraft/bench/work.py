"""Bytes and operations that one denoising pass must cost, by part: the floor that a measured time is held against.

Activations cross between parts once, in the compute dtype; logits are written by the head and read by the sampling and
by the next pass's self-conditioning. What an implementation moves beyond that counts against it.
"""

from __future__ import annotations

from redraft.bench.roofline import Work
from redraft.config import LayerConfig, ModelConfig, QuantSpec
from redraft.store.dg_w4a16 import packed_bytes

PARTS = (
    "embed", "self-conditioning", "attention", "dense", "router", "experts", "norms", "head", "sampling"
)  # fmt: skip


def pass_work(config: ModelConfig, spec: QuantSpec | None, itemsize: int, batch: int, prefix: int) -> dict[str, Work]:
    """Work of one pass of `batch` canvases over `prefix` committed tokens each; `spec` None means experts unpacked."""
    rows, h, v = batch * config.canvas_length, config.hidden_size, config.vocab_size
    wide, layers = config.intermediate_size, config.num_layers
    hidden, logits = rows * h * itemsize, rows * v * itemsize
    mlp = Work(3 * h * wide * itemsize + 2 * hidden, 6 * rows * h * wide)
    attention = sum((_attention(config, layer, itemsize, batch, prefix) for layer in config.layers), Work(0, 0))
    experts = config.num_experts
    router = Work(experts * h * itemsize + hidden + 8 * rows * config.top_k_experts, 2 * rows * experts * h)
    # Seven norms read and write, two of them also read and write the residual; then the final norm.
    norms = Work((layers * (7 * 2 + 2 * 2) + 2) * hidden, (layers * 7 + 1) * 4 * rows * h)
    return {
        "embed": Work(2 * hidden, rows * h),
        "self-conditioning": Work(v * h * itemsize + logits, 2 * rows * v * h) + mlp,
        "attention": attention,
        "dense": Work(layers * mlp.bytes, layers * mlp.flops),
        "router": Work(layers * router.bytes, layers * router.flops),
        "experts": _experts(config, spec, itemsize, rows),
        "norms": norms,
        "head": Work(v * h * itemsize + hidden + logits, 2 * rows * v * h),
        "sampling": Work(logits, 8 * rows * v),
    }


def encode_work(config: ModelConfig, spec: QuantSpec | None, itemsize: int, tokens: int) -> Work:
    """Work of encoding `tokens` of one prompt: the layers, without head, sampling and self-conditioning."""
    rows, h = tokens, config.hidden_size
    hidden = rows * h * itemsize
    dense = Work(3 * h * config.intermediate_size * itemsize, 6 * rows * h * config.intermediate_size)
    total = Work(2 * hidden, 0) + _experts(config, spec, itemsize, rows)
    for layer in config.layers:
        window = config.sliding_window if layer.kind == "sliding" else tokens
        seen = sum(min(i + 1, window) for i in range(tokens))
        total += _projections(config, layer, itemsize, rows) + dense
        total += Work(0, 4 * config.num_heads * layer.head_dim * seen)
    return total


def _projections(config: ModelConfig, layer: LayerConfig, itemsize: int, rows: int) -> Work:
    kv = layer.num_kv_heads * (2 if layer.kind == "sliding" else 1)
    weights = config.hidden_size * layer.head_dim * (2 * config.num_heads + kv)
    return Work(weights * itemsize, 2 * rows * weights)


def _attention(config: ModelConfig, layer: LayerConfig, itemsize: int, batch: int, prefix: int) -> Work:
    """Projections, the stored keys and values read once, and softmax(QK^T)V over prefix and canvas."""
    rows = batch * config.canvas_length
    stored = min(prefix, config.sliding_window - 1) if layer.kind == "sliding" else prefix
    keys_values = 2 * batch * stored * layer.num_kv_heads * layer.head_dim * itemsize
    scores = 4 * rows * config.num_heads * layer.head_dim * (stored + config.canvas_length)
    in_out = Work(2 * rows * config.hidden_size * itemsize + keys_values, scores)
    return _projections(config, layer, itemsize, rows) + in_out


def _experts(config: ModelConfig, spec: QuantSpec | None, itemsize: int, rows: int) -> Work:
    """All layers: every expert that can be visited is read once; routing of random weights leaves hardly one out."""
    h, inner, slots = config.hidden_size, config.moe_intermediate_size, rows * config.top_k_experts
    one_layer = packed_bytes(config, spec) if spec else 3 * config.num_experts * h * inner * itemsize
    visited = min(1.0, slots / config.num_experts)
    bytes_read = one_layer * visited + 2 * rows * h * itemsize
    return Work(config.num_layers * bytes_read, config.num_layers * 6 * slots * h * inner)
