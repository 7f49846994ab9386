"""Packed experts in the place of transformers' expert modules, and what transformers has to know about their ties.

One module serves encoder and decoder, so the two cannot drift apart; transformers' table of tied weights is kept up to
date beside it, for loading and saving.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import DiffusionGemmaForBlockDiffusion

from redraft.config import ModelConfig, QuantSpec
from redraft.errors import UsageError
from redraft.kernels.experts import run_experts
from redraft.kernels.experts_layout import gemm_tiles, repack, unpack_layer
from redraft.kernels.launch import HAS_TRITON
from redraft.network.weights import PackedExperts, RepackedExperts, iter_tensors
from redraft.store import dg_w4a16
from redraft.store.names import PACKED_NAMES

_DTYPES = {"U8": torch.uint8, "F16": torch.float16}


def check_model(model: Any) -> ModelConfig:
    """The shapes of a model of transformers' class. Raises UsageError for any other class."""
    if not isinstance(model, DiffusionGemmaForBlockDiffusion):
        wanted = "a loaded DiffusionGemmaForBlockDiffusion (merge or unwrap adapters first)"
        raise UsageError(f"the model is a {type(model).__name__}, expected {wanted}")
    return ModelConfig.from_dict(model.config.to_dict(), "the model's config")


def layers(model: Any) -> Iterator[tuple[Any, Any]]:
    """(decoder layer, encoder layer) of every depth."""
    return zip(model.model.decoder.layers, model.model.encoder.language_model.layers, strict=True)


class W4Experts(nn.Module):
    """Routed experts in 4 bits in the place of transformers' expert module.

    Parameters gu_q, gu_s, gu_z, dn_q, dn_s, dn_z as in `PackedExperts`, without gradients; or, where the GPU kernels
    run, the same numbers in their layout as `repacked` and no parameters.
    """

    def __init__(self, config: ModelConfig, spec: QuantSpec, tensors: Mapping[str, torch.Tensor] | None = None):
        super().__init__()
        self.config, self.spec = config, spec
        self.num_experts = config.num_experts
        self.repacked: RepackedExperts | None = None
        for name, tensor in (tensors or {}).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    @classmethod
    def empty(cls, config: ModelConfig, spec: QuantSpec) -> W4Experts:
        """Parameters on the meta device, to be filled by transformers' loader."""
        shapes = dg_w4a16.packed_shapes(config, spec)
        return cls(config, spec, {k: torch.empty(s, dtype=_DTYPES[d], device="meta") for k, (d, s) in shapes.items()})

    def adopt_kernels(self, dtype: torch.dtype) -> W4Experts:
        """Change to the kernels' layout where they cover device, shapes and the network's dtype; returns itself."""
        covered = self._parameters and self.gu_q.is_cuda and dtype == torch.bfloat16 and HAS_TRITON
        if covered and gemm_tiles(self.config, self.spec) is not None:
            self.repacked = repack(self.packed(), self.config, self.spec)
            for name in PACKED_NAMES:
                delattr(self, name)
        return self

    def packed(self) -> PackedExperts:
        """The tensors of the file format, recovered from the kernels' layout where that is in use."""
        if self.repacked is not None:
            return unpack_layer(self.repacked, self.config)
        return PackedExperts(*(getattr(self, name).detach() for name in PACKED_NAMES))

    def weights(self) -> PackedExperts | RepackedExperts:
        """The tensors as they lie here, in either layout."""
        return self.packed() if self.repacked is None else self.repacked

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [T, H], expert ids and routing weights [T, k] -> [T, H]."""
        return run_experts(hidden_states, self.weights(), top_k_weights, top_k_index)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> W4Experts:
        """Follow the network to another device, but not to another dtype: scales stay fp16."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        super()._apply(moved, recurse)
        if self.repacked is not None:
            for name, tensor in iter_tensors(self.repacked):
                setattr(self.repacked, name, moved(tensor))
        return self


def set_ties(model: Any) -> None:
    """Tell transformers which expert parameters are tied, from those that exist now.

    A pattern that matches nothing is an error there, and one that is missing leaves the encoder's copy uninitialised.
    """
    inner = model.model
    ties = {k: v for k, v in type(inner)._tied_weights_keys.items() if not k.endswith("gate_up_proj")}
    for name in inner.decoder.layers[0].experts._parameters:
        ties[rf"encoder.language_model.layers\.\d+\.experts\.{name}$"] = rf"decoder.layers\.\d+\.experts\.{name}$"
    inner._tied_weights_keys = ties
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def adopt_kernels(model: Any) -> None:
    """Change packed experts to the kernels' layout where those cover them: the model may be on a GPU only now."""
    for layer, _ in layers(model):
        layer.experts.adopt_kernels(model.dtype)
    set_ties(model)


def twin(model: Any) -> Any:
    """A copy of transformers' model whose modules are its own and whose parameters and buffers are the same tensors.

    Packed experts are shared whole. What is then installed in one of the two leaves the other as it is, so that two
    tiers run side by side for the memory of one.
    """
    shared: list[Any] = [*model.parameters(), *model.buffers()]
    shared += [module for module in model.modules() if isinstance(module, W4Experts)]
    return copy.deepcopy(model, {id(each): each for each in shared})
