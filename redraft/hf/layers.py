"""Tier `turbo` in the place of transformers' layers: fused norms, and one product for queries, keys and values.

Modules change their class and keep their parameters, hooks and places, so that saving, moving and undoing need nothing
more. Where gradients are wanted every class does what transformers does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import (
    DiffusionGemmaDecoderTextAttention,
    DiffusionGemmaDecoderTextLayer,
    DiffusionGemmaEncoderTextAttention,
    DiffusionGemmaEncoderTextLayer,
    DiffusionGemmaRMSNorm,
)

from redraft.hf.experts import W4Experts
from redraft.kernels.experts import expert_products, slot_outputs
from redraft.kernels.launch import HAS_TRITON, INTERPRET
from redraft.kernels.norms import combine_norms, residual_norms, rms_norm_into
from redraft.kernels.router import route_into, router_scratch

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def obstacle(model: Any) -> str | None:
    """Why Redraft's kernels cannot run in a model, or None."""
    devices = {parameter.device for parameter in model.parameters()}
    if not HAS_TRITON:
        return "Triton is not installed"
    if len(devices) != 1:
        return f"the model is spread over {', '.join(sorted(map(str, devices)))}"
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "hooks of the accelerate library run its layers, as after loading with offloading"
    kind = devices.pop().type
    if kind == "cpu" and INTERPRET.value:
        return None
    if kind != "cuda":
        return f"the model is on {kind}, the kernels need a GPU"
    return None if model.dtype == torch.bfloat16 else f"the model is in {model.dtype}, the kernels compute in BF16"


class FusedNorm(DiffusionGemmaRMSNorm):
    """RMSNorm in one launch."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.requires_grad:
            return super().forward(hidden_states)
        x, width = hidden_states, hidden_states.shape[-1]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        # Heads of a slice of the QKV product lie side by side in rows of the whole product.
        rows = x.flatten(0, -3) if x.ndim == 4 and x.stride(-2) == width and x.stride(-1) == 1 else x.reshape(-1, width)
        rms_norm_into(rows, self.weight if self.with_scale else None, self.eps, out.view(rows.shape))
        return out


class JoinedLinear(nn.Linear):
    """One of the projections whose product its attention layer has computed for all of them."""

    part: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        parts = getattr(input, "_redraft_qkv", None)
        return super().forward(input) if parts is None else parts[self.part]


class _JoinedAttention:
    """Computes queries, keys and values in one product where their weights are one tensor.

    The product travels with the input, as an attribute of a tensor object of its own, so calls share no state.
    """

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        weights = [linear.weight for linear in projections(self)]
        joined = None if torch.is_grad_enabled() else stacked(weights)
        if joined is not None:
            product = F.linear(hidden_states, joined)
            hidden_states = hidden_states.view_as(hidden_states)
            hidden_states._redraft_qkv = product.split([len(w) for w in weights], dim=-1)  # type: ignore[attr-defined]
        return super().forward(hidden_states=hidden_states, **kwargs)  # type: ignore[misc]


class _FusedLayer:
    """A layer in which residual sums and the norms around them are two launches, and routing is one more."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        layer: Any = self
        # The router's weight is read directly, so an adapter around it, loaded later, must run as it is.
        if hidden_states.requires_grad or type(layer.router.proj) is not nn.Linear:
            return super().forward(hidden_states, **kwargs)  # type: ignore[misc]
        attended = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)[0]
        # The kernels add in place, and hidden_states may be kept by who asked for every layer's output.
        x = hidden_states.reshape(-1, hidden_states.shape[-1]).clone()
        _feed_forward(layer, x, attended.reshape(x.shape))
        return x.view(hidden_states.shape)


def _feed_forward(layer: Any, x: torch.Tensor, delta: torch.Tensor) -> None:
    """x += norm(delta), then x becomes the layer's output; both [R, H]."""
    (rows, hidden), eps = x.shape, layer.input_layernorm.eps
    router, top_k = layer.router, layer.router.config.top_k_experts
    packed = layer.experts.repacked
    group = packed.spec.group_gate_up if packed is not None else math.gcd(hidden, 128)
    dense_in, expert_in, router_in, unused = (torch.empty_like(x) for _ in range(4))
    sums = torch.empty(rows, hidden // group, dtype=torch.float32, device=x.device)
    residual_norms(
        x, delta.contiguous(), layer.post_attention_layernorm.weight, layer.pre_feedforward_layernorm.weight,
        layer.pre_feedforward_layernorm_2.weight, router.scale, eps, dense_in=dense_in, expert_in=expert_in,
        router_in=router_in, group_sums=sums, group_size=group,
    )  # fmt: skip
    routing = torch.empty(rows, top_k, dtype=torch.float32, device=x.device)
    chosen = torch.empty(rows, top_k, dtype=torch.int32, device=x.device)
    route_into(
        router_in, router.proj.weight, router.per_expert_scale, top_k, weights=routing, experts=chosen,
        scratch=router_scratch(rows, hidden, router.proj.out_features, x.device),
    )  # fmt: skip
    expert_out, slot_of, routing = _experts(layer.experts, expert_in, sums, chosen, routing)
    combine_norms(
        x, layer.mlp(dense_in), expert_out, slot_of, routing, layer.post_feedforward_layernorm_1.weight,
        layer.post_feedforward_layernorm_2.weight, layer.post_feedforward_layernorm.weight, layer.layer_scalar,
        layer.input_layernorm.weight, eps, next_in=unused,
    )  # fmt: skip


def _experts(
    experts: W4Experts, x: torch.Tensor, sums: torch.Tensor, chosen: torch.Tensor, routing: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `combine_norms` sums per row: expert outputs, where a row's outputs are, and their weights."""
    if experts.repacked is None:
        rows, routed = chosen.shape[0], experts(x, chosen.long(), routing)
        slot_of = torch.arange(rows, dtype=torch.int32, device=x.device)
        return routed, slot_of, torch.ones(rows, 1, dtype=torch.float32, device=x.device)
    width = experts.config.moe_intermediate_size
    products = expert_products(x.shape[1], width, experts.spec, x.device)
    out, slots = slot_outputs(x, sums, experts.repacked, width, chosen, products)
    return out, slots.slot_of, routing


def _over(forward: type, *classes: type) -> dict[type, type]:
    """Each of transformers' classes -> the same with the given forward before its own."""
    names = {stock: forward.__name__.removeprefix("_") + stock.__name__ for stock in classes}
    return {stock: type(name, (forward, stock), {}) for stock, name in names.items()}


_ATTENTION = _over(_JoinedAttention, DiffusionGemmaEncoderTextAttention, DiffusionGemmaDecoderTextAttention)
_LAYERS = _over(_FusedLayer, DiffusionGemmaEncoderTextLayer, DiffusionGemmaDecoderTextLayer)
_FUSED: dict[type, type] = {DiffusionGemmaRMSNorm: FusedNorm, **_LAYERS}
_JOINED: dict[type, type] = {nn.Linear: JoinedLinear, **_ATTENTION}


def fuse_norms(model: Any) -> int:
    """Change norms and layers of the text network to the fused classes; returns how many."""
    return _swap(_text_modules(model), _FUSED)


def join_projections(model: Any) -> str | None:
    """Make the projections of every attention layer one tensor each; or change nothing and return why not.

    Parameters stay what they are, as views of the joined tensor: memory grows by one layer's while it is joined.
    """
    layers = [module for module in _text_modules(model) if type(module) in _ATTENTION]
    for layer in layers:
        for name, linear in zip(_PROJECTIONS, projections(layer), strict=False):
            if type(linear) not in (nn.Linear, JoinedLinear) or linear.bias is not None:
                kind = "has a bias" if getattr(linear, "bias", None) is not None else f"is a {type(linear).__name__}"
                return f"layer {layer.layer_idx}: {name} {kind}; adapters must be merged first"
    for layer in layers:
        linears = projections(layer)
        weights = [linear.weight for linear in linears]
        if stacked(weights) is None:
            joined = torch.cat([weight.detach() for weight in weights])
            for weight, view in zip(weights, joined.split([len(w) for w in weights]), strict=True):
                weight.data = view
        _swap([*linears, layer], _JOINED)
        for part, linear in enumerate(linears):
            linear.part = part
    return None


def restore(model: Any) -> None:
    """Give every module transformers' own class back. Joined weights stay joined: nobody else can tell."""
    _swap(model.modules(), {fused: stock for stock, fused in (_FUSED | _JOINED).items()})


def _swap(modules: Iterable[nn.Module], classes: dict[type, type]) -> int:
    found = [module for module in modules if type(module) in classes]
    for module in found:
        module.__class__ = classes[type(module)]
    return len(found)


def _text_modules(model: Any) -> Iterator[nn.Module]:
    """Every module of decoder and language encoder; the vision tower stays as it is."""
    yield from model.model.decoder.modules()
    yield from model.model.encoder.language_model.modules()


def projections(attention: Any) -> list[Any]:
    """q_proj, k_proj and, where there is one, v_proj."""
    return [linear for name in _PROJECTIONS if (linear := getattr(attention, name)) is not None]


def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The matrices [N_i, K] as one [sum N_i, K] without a copy, or None where they do not follow each other."""
    first = weights[0]
    following, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for weight in weights:
        own = weight.untyped_storage().data_ptr()
        if weight.data_ptr() != following or own != storage or not weight.is_contiguous():
            return None
        following += weight.nbytes
    return first.detach().as_strided((sum(map(len, weights)), first.shape[1]), first.stride())
