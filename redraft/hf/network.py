"""Redraft's loop over the parameters of transformers' own model: nothing is held twice."""

from __future__ import annotations

import threading
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from transformers import DiffusionGemmaForBlockDiffusion

from redraft.config import ModelConfig, QuantSpec
from redraft.engine.engine import missing_kernels, open_desk
from redraft.engine.tickets import Desk
from redraft.errors import UsageError
from redraft.hf.experts import W4Experts, adopt_kernels, check_model, layers
from redraft.kernels.weights import DenseExperts, SelfConditioningWeights
from redraft.network.fused import FusedModel
from redraft.network.model import Model
from redraft.network.weights import LayerWeights, Weights
from redraft.store.names import layer_tensors, shared_tensors

_STOCK = ("transformers.models.diffusion_gemma.", "transformers.activations", "torch.nn.modules.")


class OwnLoop:
    """The loop of one model, opened with the first call, and anew when its modules or parameters are others.

    A copy of the model opens its own.
    """

    def __init__(self) -> None:
        self.said: set[str] = set()  # reasons for stock `generate` that the user knows
        self._desk: Desk | None = None
        self._reason: str | None = None
        self._traits: list[Any] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[OwnLoop], tuple[()]]:
        return OwnLoop, ()

    def desk(self, model: Any) -> Desk:
        """Where requests to the model as it is now are put in line. Raises UsageError with its `obstacle`."""
        with self._lock:
            if traits(model) != self._traits:
                self.close()
                self._reason = obstacle(model)
                if self._reason is None:
                    self._desk = _open(model)
                self._traits = traits(model)  # joined projections lie elsewhere now
            if self._desk is None:
                raise UsageError(str(self._reason))
            return self._desk

    def close(self) -> None:
        """Give the loop's memory back; the next call opens another."""
        if self._desk is not None:
            self._desk.close()
        self._desk, self._traits = None, []


def _open(model: Any) -> Desk:
    config, spec = check_model(model), expert_spec(model)
    if spec is not None:
        adopt_kernels(model)
    weights = module_weights(model, config)
    fused = FusedModel(config, weights, spec) if no_kernels(model) is None else None
    return open_desk(Model(config, weights), fused, text=None)


def expert_spec(model: Any) -> QuantSpec | None:
    """The group sizes of packed experts, None of plain ones."""
    experts = model.model.decoder.layers[0].experts
    return experts.spec if isinstance(experts, W4Experts) else None


def module_weights(model: Any, config: ModelConfig) -> Weights:
    """The model's own parameters and buffers, as objects: what moves one of them moves it for both."""
    shared = {key: attrgetter(name)(model) for key, (name, _) in shared_tensors(config).items()}
    found = []
    for index, (layer, _) in enumerate(layers(model)):
        named = {key: attrgetter(name)(model) for key, (name, _) in layer_tensors(config, index).items()}
        packed, own = isinstance(layer.experts, W4Experts), layer.experts
        experts = own.weights() if packed else DenseExperts(own.gate_up_proj.detach(), own.down_proj.detach())
        found.append(LayerWeights(**{"v_proj": None, **named}, experts=experts))
    return Weights(shared.pop("embed"), found, shared.pop("norm"), SelfConditioningWeights(**shared))


def no_kernels(model: Any) -> str | None:
    """Why passes of the loop cannot be fused, or None."""
    embed = model.lm_head.weight
    if not embed.is_cuda:
        return f"the model is on {embed.device.type}, the kernels need a GPU"
    if embed.dtype != torch.bfloat16:
        return f"the model is in {embed.dtype}, the kernels compute in BF16"
    return missing_kernels(check_model(model), expert_spec(model))


def obstacle(model: Any) -> str | None:
    """What of a model the loop would not obey, or None."""
    for name in ("generate", "forward", "_denoising_step", "_prepare_sampler"):
        if getattr(type(model), name) is not getattr(DiffusionGemmaForBlockDiffusion, name):
            return f"{type(model).__name__} has a {name} of its own"
    modules = _text_modules(model)
    for module in modules:
        if (reason := _module_obstacle(module)) is not None:
            name = next(name for name, each in model.named_modules() if each is module)
            return f"{name or 'the model'} {reason}"
    if "_hf_hook" in {name for module in modules for name in vars(module)}:
        return "hooks of the accelerate library run its layers, as after loading with offloading"
    places = {str(tensor.device) for module in modules for tensor in _tensors(module)}
    if len(places) > 1 or "meta" in places:
        return f"the model is spread over {', '.join(sorted(places))}"
    plain = [module for module in modules if not isinstance(module, W4Experts)]
    dtypes = {str(p.dtype) for module in plain for p in module._parameters.values() if p is not None}
    if len(dtypes) > 1:
        return f"its weights are in {' and '.join(sorted(dtypes))}"
    return _untied(model)


def _module_obstacle(module: nn.Module) -> str | None:
    kind = type(module)
    if not kind.__module__.startswith(_STOCK) and not isinstance(module, W4Experts | DiffusionGemmaForBlockDiffusion):
        return f"is a {kind.__name__}; adapters must be merged first"
    if isinstance(module, nn.Linear) and module.bias is not None:
        return "has a bias"
    return "has hooks or a forward of its own" if _hooks(module) and "_hf_hook" not in vars(module) else None


def _untied(model: Any) -> str | None:
    """The first weight that encoder and decoder, or embedding and head, do not share; layer scalars are apart."""
    decoder, encoder = model.model.decoder, model.model.encoder.language_model
    if model.lm_head.weight is not decoder.embed_tokens.weight:
        return "the head is not tied to the embedding"
    own = dict(decoder.named_parameters(remove_duplicate=False))
    for name, parameter in encoder.named_parameters(remove_duplicate=False):
        if parameter is not own.get(name):
            return f"{name} differs between encoder and decoder"
    return None


def traits(model: Any) -> list[Any]:
    """What the loop takes for granted: the text network's modules, their classes and hooks, where their tensors lie.

    Read before every call, so without names, and with nothing that would keep the model alive.
    """
    found: list[Any] = []
    for module in _text_modules(model):
        found += (id(module), type(module), _hooks(module))
        for tensor in _tensors(module):
            found += (id(tensor), tensor.data_ptr())
    return found


def _text_modules(model: Any) -> list[nn.Module]:
    """Every module that a pass over text goes through."""
    inner = model.model
    found = [model.lm_head, inner.decoder, inner.encoder.language_model]
    for module in found:  # which grows on the way
        found += [child for child in module._modules.values() if child is not None]
    return [model, inner, inner.encoder, *found]


def _hooks(module: nn.Module) -> int:
    """How many ways its forward has to do something else."""
    own = ("forward" in vars(module)) + ("_hf_hook" in vars(module))
    return own + len(module._forward_hooks) + len(module._forward_pre_hooks)


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    """The tensors of a module itself."""
    found = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    if isinstance(module, W4Experts) and module.repacked is not None:
        found += (module.repacked.gate_up, module.repacked.down)
    return found
