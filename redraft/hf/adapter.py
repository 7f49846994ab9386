"""A PEFT model's LoRA adapter, merged into the weights of the loaded model: W + B A * scale, as in `quant/lora.py`.

PEFT's own `merge_and_unload` adds twice to a weight that encoder and decoder share, and in the weight's dtype. PEFT is
not imported here: its model saves the adapter, which is read as any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from redraft.errors import CheckpointError, UsageError
from redraft.quant.lora import assign, merge, one_sided, read_adapter
from redraft.store.names import canonical_name


def base_model(model: Any) -> Any:
    """The model inside a PEFT wrapper; any other model itself."""
    return model.base_model.model if hasattr(model, "get_base_model") else model


@torch.no_grad()
def merge_adapter(model: Any) -> int:
    """Merge the active adapter of a PEFT model into its base model in place and take the adapter's layers out.

    Returns how many weights were changed, 0 when there are no such layers. Raises UsageError, before anything is
    changed, when the merged weights could not compute what the adapter does; CheckpointError for a sum that is not
    finite.
    """
    base = base_model(model)
    layers = {name: module for name, module in base.named_modules() if hasattr(module, "lora_A")}
    if not layers:
        return 0
    if base is model:
        raise UsageError("an adapter was loaded into the model itself; wrap it with peft.PeftModel.from_pretrained")
    name = _active_adapter(model, layers)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder, selected_adapters=[name], save_embedding_layers=False)
        place = Path(folder) if name == "default" else Path(folder, name)
        weights = _weights(base)
        try:
            factors = [dataclasses.replace(f, scale=layers[f.module].scaling[name]) for f in read_adapter(place)]
            targets = assign(factors, {key: tuple(w[0].shape) for key, w in weights.items()}, "the model")
            if sentences := one_sided(targets):
                raise CheckpointError(sentences[0])
        except CheckpointError as e:
            raise UsageError(
                f"the adapter cannot be merged: {str(e).replace(f'{place}/', '')}. To use it as it is, accelerate the "
                "model without it with tier 'bitexact' and load it on the result"
            ) from None
        for key in targets:
            if any(weight.is_meta for weight in weights[key]):
                raise UsageError(f"{key} is offloaded; load the model where it fits before merging an adapter")
            if not all(torch.equal(weights[key][0], other) for other in weights[key][1:]):
                raise UsageError(f"{key} differs between encoder and decoder, to which the network ties it")
        for key, (first, *_) in targets.items():
            merged = merge(weights[key][0], first)
            for weight in weights[key]:
                weight.copy_(merged)
    model.unload()
    return len(targets)


def _active_adapter(model: Any, layers: Mapping[str, Any]) -> str:
    if any(layer.merged for layer in layers.values()):
        raise UsageError("the adapter is merged already, into both sides apart; call unmerge_adapter() on the model")
    active = list(model.active_adapters)
    if len(active) != 1:
        raise UsageError(f"adapters {', '.join(active) or 'none'} are active; activate one with set_adapter")
    return str(active[0])


def _weights(base: Any) -> dict[str, list[torch.Tensor]]:
    """By canonical name the parameters that it stands for: one where encoder and decoder share it."""
    weights: dict[str, list[torch.Tensor]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        same = weights.setdefault(canonical_name(name.replace(".base_layer.", ".")), [])
        if not any(parameter is other for other in same):
            same.append(parameter)
    return weights
