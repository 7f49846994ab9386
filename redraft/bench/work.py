"""Bytes and operations that one denoising pass must cost, by part: the floor that a measured time is held against.

Activations cross between parts once, in the compute dtype; logits are written by the head and read by the sampling and
by the next pass's self-conditioning. What an implementation moves beyond that counts against it.

Whole answers, by diffusion and token by token, cost their passes after the prompts were read, each over the rows that
still had an answer to find. A canvas visits about every expert; the few rows of a token step do not, and the experts
that they read are taken from their routing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Self

from redraft.bench.roofline import Work
from redraft.config import LayerConfig, ModelConfig, QuantSpec
from redraft.engine.engine import Engine
from redraft.network.weights import DenseExperts, PackedExperts
from redraft.store.dg_w4a16 import packed_bytes

PARTS = ("embed", "self-conditioning", "attention", "dense", "router", "experts", "norms", "head", "sampling")


@dataclass(frozen=True)
class Shapes:
    """What work follows from. spec: group sizes of packed experts, or None; itemsize: bytes of all other elements."""

    config: ModelConfig
    spec: QuantSpec | None
    itemsize: int

    @classmethod
    def of(cls, engine: Engine) -> Self:
        return cls(engine.config, expert_spec(engine), engine.dtype.itemsize)

    @property
    def expert_bytes(self) -> float:
        """Weights of one expert of one layer."""
        if self.spec is not None:
            return packed_bytes(self.config, self.spec) / self.config.num_experts
        return 3 * self.config.hidden_size * self.config.moe_intermediate_size * self.itemsize


def expert_spec(engine: Engine) -> QuantSpec | None:
    """Group sizes of the experts in memory, None when they are not packed."""
    experts = engine.model.weights.layers[0].experts
    if isinstance(experts, DenseExperts):
        return None
    if not isinstance(experts, PackedExperts):
        return experts.spec
    hidden, inner = engine.config.hidden_size, engine.config.moe_intermediate_size
    return QuantSpec(hidden // experts.gu_s.shape[-1], inner // experts.dn_s.shape[-1])


def pass_work(shapes: Shapes, batch: int, prefix: int) -> dict[str, Work]:
    """Work of one pass of `batch` canvases over `prefix` committed tokens each."""
    config, itemsize = shapes.config, shapes.itemsize
    rows, h, v = batch * config.canvas_length, config.hidden_size, config.vocab_size
    layers, experts = config.num_layers, config.num_experts
    hidden, logits = rows * h * itemsize, rows * v * itemsize
    mlp = _mlp(shapes, rows) + Work(2 * hidden, 0)
    router = Work(experts * h * itemsize + hidden + 8 * rows * config.top_k_experts, 2 * rows * experts * h)
    # Seven norms read and write, two of them also read and write the residual; then the final norm.
    norms = Work((layers * (7 * 2 + 2 * 2) + 2) * hidden, (layers * 7 + 1) * 4 * rows * h)
    return {
        "embed": Work(2 * hidden, rows * h),
        "self-conditioning": Work(v * h * itemsize + logits, 2 * rows * v * h) + mlp,
        "attention": Work.total(_attention(shapes, layer, batch, prefix) for layer in config.layers),
        "dense": mlp * layers,
        "router": router * layers,
        "experts": _experts(shapes, rows),
        "norms": norms,
        "head": Work(v * h * itemsize + hidden + logits, 2 * rows * v * h),
        "sampling": Work(logits, 8 * rows * v),
    }


def encode_work(shapes: Shapes, tokens: int) -> Work:
    """Work of encoding `tokens` of one prompt: the layers, without head, sampling and self-conditioning."""
    config = shapes.config
    total = Work(2 * tokens * config.hidden_size * shapes.itemsize, 0) + _experts(shapes, tokens)
    for layer in config.layers:
        window = config.sliding_window if layer.kind == "sliding" else tokens
        seen = sum(min(i + 1, window) for i in range(tokens))
        total += _projections(shapes, layer, tokens) + _mlp(shapes, tokens)
        total += Work(0, 4 * config.num_heads * layer.head_dim * seen)
    return total


def denoise_passes(
    prompts: Sequence[int], steps: Sequence[Sequence[int]], length: int, lockstep: bool
) -> list[list[int]]:
    """For each pass of a batch, the committed tokens of every request that it moved on.

    prompts: tokens of each request; steps: its passes by canvas of `length` tokens. lockstep: requests begin every
    canvas together, as on the reference network; in slots each goes on at its own pace.
    """
    longest = [max(canvas) for canvas in zip_longest(*steps, fillvalue=0)]
    rows: list[list[int | None]] = []
    for prompt, own in zip(prompts, steps, strict=True):
        row: list[int | None] = []
        for canvas, count in enumerate(own):
            waits = longest[canvas] - count if lockstep else 0
            row += [prompt + canvas * length] * count + [None] * waits
        rows.append(row)
    return [[prefix for prefix in column if prefix is not None] for column in zip_longest(*rows)]


def diffusion_work(shapes: Shapes, passes: Sequence[list[int]], steps: Sequence[Sequence[int]], lockstep: bool) -> Work:
    """Work of the passes that `denoise_passes` gives for these steps, and of the commits between canvases."""
    denoising = Work.total(w for prefixes in passes for w in pass_work(shapes, len(prefixes), _mean(prefixes)).values())
    one = encode_work(shapes, shapes.config.canvas_length)
    commits = sum(len(own) - 1 for own in steps)
    reads = max(map(len, steps)) - 1 if lockstep else commits
    return denoising + Work(one.bytes * reads, one.flops * commits)


def autoregressive_work(shapes: Shapes, passes: Sequence[list[int]], experts: Sequence[int]) -> Work:
    """Work of steps of one token. experts: distinct ones that each step visits, over all layers together."""
    return Work.total(
        step_work(shapes, len(own), _mean(own), visited) for own, visited in zip(passes, experts, strict=True)
    )


def step_work(shapes: Shapes, batch: int, prefix: int, experts: int) -> Work:
    """Work of one token of `batch` requests over `prefix` committed tokens each, head and argmax included."""
    config = shapes.config
    parts = pass_work(replace(shapes, config=replace(config, canvas_length=1)), batch, prefix)
    del parts["self-conditioning"]
    parts["sampling"] = Work(parts["sampling"].bytes, batch * config.vocab_size)  # the argmax
    hidden = 2 * config.num_layers * batch * config.hidden_size * shapes.itemsize
    parts["experts"] = Work(experts * shapes.expert_bytes + hidden, parts["experts"].flops)
    return Work.total(parts.values())


def _mean(prefixes: Sequence[int]) -> int:
    return round(sum(prefixes) / len(prefixes))


def _mlp(shapes: Shapes, rows: int) -> Work:
    """The dense MLP of one layer, its weights alone in bytes."""
    weights = 3 * shapes.config.hidden_size * shapes.config.intermediate_size
    return Work(weights * shapes.itemsize, 2 * rows * weights)


def _projections(shapes: Shapes, layer: LayerConfig, rows: int) -> Work:
    kv = layer.num_kv_heads * (2 if layer.kind == "sliding" else 1)
    weights = shapes.config.hidden_size * layer.head_dim * (2 * shapes.config.num_heads + kv)
    return Work(weights * shapes.itemsize, 2 * rows * weights)


def _attention(shapes: Shapes, layer: LayerConfig, batch: int, prefix: int) -> Work:
    """Projections, the stored keys and values read once, and softmax(QK^T)V over prefix and canvas."""
    config = shapes.config
    rows = batch * config.canvas_length
    stored = min(prefix, config.sliding_window - 1) if layer.kind == "sliding" else prefix
    keys_values = 2 * batch * stored * layer.num_kv_heads * layer.head_dim
    scores = 4 * rows * config.num_heads * layer.head_dim * (stored + config.canvas_length)
    in_out = Work((2 * rows * config.hidden_size + keys_values) * shapes.itemsize, scores)
    return _projections(shapes, layer, rows) + in_out


def _experts(shapes: Shapes, rows: int) -> Work:
    """All layers: every expert that can be visited is read once; routing of random weights leaves hardly one out."""
    config = shapes.config
    h, slots = config.hidden_size, rows * config.top_k_experts
    visited = min(config.num_experts, slots) * shapes.expert_bytes
    layer = Work(visited + 2 * rows * h * shapes.itemsize, 6 * slots * h * config.moe_intermediate_size)
    return layer * config.num_layers
