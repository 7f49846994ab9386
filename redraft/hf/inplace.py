"""`accelerate`: a loaded model's experts packed in place, layer by layer, and a tier installed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from redraft.config import TIERS, ModelConfig, QuantSpec, Tier, check_choice
from redraft.errors import UsageError
from redraft.hf.adapter import base_model, merge_adapter
from redraft.hf.experts import W4Experts, adopt_kernels, check_model, layers, set_ties
from redraft.hf.quantizer import W4Config, W4Quantizer
from redraft.hf.tiers import install
from redraft.network.weights import nbytes
from redraft.quant.rtn import quantize_experts


@dataclass(frozen=True)
class AccelerateReport:
    """What `accelerate` did. Bytes count the routed experts once, before and after; `kept` says why per part."""

    tier: Tier
    spec: QuantSpec
    layers_packed: int  # by this call; 0 when the model's experts were packed already
    expert_bytes_before: int
    expert_bytes_after: int
    replaced: dict[str, str]
    kept: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [f"replaced {part}: {how}" for part, how in self.replaced.items()]
        return "\n".join([f"tier {self.tier}", *lines, *(f"kept {part}: {why}" for part, why in self.kept.items())])


def accelerate(model: Any, tier: Tier = "turbo", spec: QuantSpec | None = None) -> AccelerateReport:
    """Pack the routed experts of a loaded `DiffusionGemmaForBlockDiffusion` in place and install a tier.

    Works layer by layer where the experts lie; at no time does more than one layer exist in both forms. spec: group
    sizes, by default the published ones, or those of a model that is packed already. A second call changes the tier.
    A PEFT model's adapter is merged first; what it wraps is `get_base_model()`.

    Raises UsageError, before anything is changed, for another class of model, an unknown tier, groups that do not
    divide the shapes, experts that are offloaded or quantised by something else, and an adapter that cannot be merged;
    CheckpointError for a weight that is not finite: layers before it are packed by then, so load the model again.
    """
    check_choice("tier", tier, TIERS)
    wrapped, model = model, base_model(model)
    config = check_model(model)
    specs = {layer.experts.spec if isinstance(layer.experts, W4Experts) else None for layer, _ in layers(model)}
    found = None if None in specs else specs.pop()
    if found is not None and spec not in (None, found):
        raise UsageError(f"the experts are packed with {found} already, not {spec}; load the BF16 model again")
    spec = found or spec or QuantSpec()
    if found is None:
        spec.check(config)
        _check_dense(model)
    merged = merge_adapter(wrapped)
    before = _expert_bytes(model)
    if found is None:
        _pack(model, config, spec)
    else:
        adopt_kernels(model)
    replaced, kept = install(model, tier)
    if merged:
        replaced["adapter"] = f"merged into {merged} weights, in fp32; its layers are gone"
    kernels = model.model.decoder.layers[0].experts.repacked is not None
    path = "GPU kernels" if kernels else "torch's operations, dequantising one expert at a time"
    groups = f"groups of {spec.group_gate_up} (gate and up) and {spec.group_down} (down)"
    replaced = {"experts": f"4 bits in {groups}, one copy for encoder and decoder, run by {path}", **replaced}
    kept = {"attention, dense MLP, router, embedding": "transformers' own weights, in the model's dtype", **kept}
    packed = config.num_layers if found is None else 0
    return AccelerateReport(tier, spec, packed, before, _expert_bytes(model), replaced, kept)


def _check_dense(model: Any) -> None:
    method = getattr(model, "quantization_method", None)
    if method is not None:
        raise UsageError(f"the model is quantised with {getattr(method, 'value', method)!r}; load the BF16 checkpoint")
    for index, (decoder, encoder) in enumerate(layers(model)):
        for name in ("gate_up_proj", "down_proj"):
            own, other = getattr(decoder.experts, name, None), getattr(encoder.experts, name, None)
            place = f"layer {index}: experts.{name}"
            if own is None or other is None or not own.is_floating_point() or own.ndim != 3:
                raise UsageError(f"{place} is not transformers' own weight; accelerate a freshly loaded model")
            if "meta" in (own.device.type, other.device.type):
                raise UsageError(f"{place} is offloaded; load the model where it fits, or quantise while loading")
            if own is not other and not torch.equal(own, other):
                raise UsageError(f"{place} differs between encoder and decoder, which one packed copy cannot serve")


def _pack(model: Any, config: ModelConfig, spec: QuantSpec) -> None:
    for index, (decoder, encoder) in enumerate(layers(model)):
        dense = decoder.experts
        pair = dense.gate_up_proj.detach(), dense.down_proj.detach()
        packed = quantize_experts(*pair, spec, where=f"layer {index}: experts")
        # The last references to the unpacked weights go here, before the next layer is packed.
        del dense, pair
        decoder.experts = encoder.experts = W4Experts(config, spec, vars(packed)).adopt_kernels(model.dtype)
    set_ties(model)
    # So that `save_pretrained` writes the model as it does one that was loaded packed.
    method = W4Config(*dataclasses.astuple(spec))
    model.hf_quantizer = W4Quantizer(method)
    model.is_quantized, model.quantization_method = True, method.quant_method
    model.config.quantization_config = method


def _expert_bytes(model: Any) -> int:
    experts = [layer.experts for layer, _ in layers(model)]
    repacked = sum(nbytes(e.repacked) for e in experts if isinstance(e, W4Experts))
    return repacked + sum(p.nbytes for e in experts for p in e.parameters())
