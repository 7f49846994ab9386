"""What answers for an arm: transformers' `generate` or Redraft's engine, loaded once and shared between arms.

The W4 model of transformers is made in this process of the BF16 one: modules of its own around the same tensors, and
packed experts in the place of the dense ones. Where memory does not suffice for both it is packed in place.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from redraft.config import ModelConfig, QuantSpec, Tier, WeightFormat
from redraft.evaluate.arms import Arm
from redraft.evaluate.generate import TransformersEngine
from redraft.evaluate.run import Side
from redraft.network.weights import nbytes
from redraft.quant.load import load_checkpoint
from redraft.store import compressed_tensors
from redraft.store.names import expert_names, layer_tensors, shared_tensors, text_tensors
from redraft.store.open import load_tokenizer
from redraft.store.random import is_random, weight_bytes
from redraft.store.read import CheckpointFiles

WORKING_LOGITS = 16  # a pass has at most about so many fp32 copies of a canvas's logits at once


def stored_packed(files: CheckpointFiles) -> bool:
    """Whether a checkpoint has its experts in 4 bits only; random weights can be drawn either way."""
    return files.spec is not None and not is_random(files.path)


class Models:
    """The loaded models of a comparison, all on one device in one dtype.

    files: what `open_model` gave, by MODEL argument. in_place: a W4 model takes the place of the BF16 one.
    """

    def __init__(self, files: dict[str, CheckpointFiles], device: torch.device, dtype: torch.dtype, in_place: bool):
        self.files, self.device, self.dtype, self.in_place = files, device, dtype, in_place
        self._tokenizers: dict[str, Any] = {}
        self._loaded: dict[tuple[str, WeightFormat | None, Tier | None], Any] = {}  # tier None: an engine

    def open(self, arm: Arm) -> Side:
        """Load what answers for an arm, or make it of what is loaded. Raises RedraftError."""
        if arm.runner == "engine":
            engine = self._engine(arm.model, arm.weights)
            about = "fused kernels as CUDA graphs" if engine.fused and arm.tier == "turbo" else "torch's operations"
            answer = partial(engine.generate_batch, tier=arm.tier)
            return Side(arm.name, answer, self.device, weight_bytes=engine.weight_bytes, about={"passes": about})
        model = self._transformers(arm.model, arm.weights, arm.tier)
        wrapped = TransformersEngine(model, self._tokenizer(arm.model), self.files[arm.model].settings)
        size, how = model_bytes(model), _about(model)
        return Side(arm.name, wrapped.generate_batch, self.device, weight_bytes=size, about=how)

    def close(self, following: Sequence[Arm]) -> None:
        """Let go of everything but BF16 models that the following arms are made of in place."""
        sources = {(arm.model, "bf16", "off") for arm in following if arm.runner == "transformers"}
        self._loaded = {key: model for key, model in self._loaded.items() if key in sources}
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _engine(self, model: str, weights: WeightFormat | None) -> Any:
        import redraft

        key = (model, weights, None)
        if key not in self._loaded:
            self._loaded[key] = redraft.load(model, weights=weights, device=str(self.device), dtype=self.dtype)
        return self._loaded[key]

    def _transformers(self, name: str, weights: WeightFormat | None, tier: Tier) -> Any:
        from redraft.hf.experts import twin

        key = (name, weights, tier)
        if key not in self._loaded:
            if tier != "off":
                model = twin(self._transformers(name, weights, "off"))
                _set_tier(model, weights, tier)
            elif weights == "w4" and (source := self._loaded.get((name, "bf16", "off"))) is not None:
                model = self._loaded.pop((name, "bf16", "off")) if self.in_place else twin(source)
                _set_tier(model, weights, "off")
            else:
                model = load_transformers(name, self.files[name], weights, self.device, self.dtype)
            self._loaded[key] = model
        return self._loaded[key]

    def _tokenizer(self, model: str) -> Any:
        if model not in self._tokenizers:
            self._tokenizers[model] = load_tokenizer(self.files[model].path)
        return self._tokenizers[model]


def _set_tier(model: Any, weights: WeightFormat | None, tier: Tier) -> None:
    from redraft.hf import accelerate
    from redraft.hf.experts import layers
    from redraft.hf.generation import install

    if weights == "w4":
        accelerate(model, tier)
        return
    for layer in (layer for pair in layers(model) for layer in pair):
        layer.experts.repacked = None  # to fused layers: experts that no kernel covers, run as they are
    install(model, tier)


def load_transformers(
    name: str, files: CheckpointFiles, weights: WeightFormat | None, device: torch.device, dtype: torch.dtype
) -> Any:
    """transformers' model by its own `from_pretrained`; experts packed while loading for w4."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    from redraft.bench.rivals import transformers_config
    from redraft.hf import W4Config

    # Its own placement needs the library accelerate; without it weights take the way over the host's memory.
    options: dict[str, Any] = {"dtype": dtype}
    if device.type != "cpu" and find_spec("accelerate"):
        options["device_map"] = {"": device}
    path: Path | None = files.path
    if is_random(name):
        path = None
        options |= {"config": transformers_config(files.config), "state_dict": random_tensors(name, device, dtype)}
    elif files.format == compressed_tensors.FORMAT:  # by our method, not by transformers' own of that name
        options["config"] = DiffusionGemmaConfig.from_pretrained(files.path)
        options["config"].quantization_config = W4Config().to_dict()
    elif weights == "w4":
        options["quantization_config"] = W4Config()
    model: Any = DiffusionGemmaForBlockDiffusion.from_pretrained(path, **options)
    model = model.to(device).eval()
    if is_random(name) and weights == "w4":
        _set_tier(model, "w4", "off")
    return model


def random_tensors(name: str, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of random weights in full precision under transformers' names."""
    drawn = load_checkpoint(name, "bf16", dtype, device)
    weights = drawn.weights
    shared = {"embed": weights.embed, "norm": weights.norm, **vars(weights.self_conditioning)}
    state = {place: shared[key] for key, (place, _) in shared_tensors(drawn.config).items()}
    for index, layer in enumerate(weights.layers):
        state |= {place: getattr(layer, key) for key, (place, _) in layer_tensors(drawn.config, index).items()}
        state |= zip(expert_names(index), vars(layer.experts).values(), strict=True)
    return state


def model_bytes(model: Any) -> int:
    """Bytes of a model of transformers: every tensor once, packed experts in the kernels' layout included."""
    tensors = {id(t): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    repacked = (getattr(layer.experts, "repacked", None) for layer in model.model.decoder.layers)
    return sum(tensors.values()) + sum(map(nbytes, repacked))


def _about(model: Any) -> dict[str, str]:
    from redraft.hf.experts import W4Experts

    experts, path = model.model.decoder.layers[0].experts, f"transformers' {model.config._experts_implementation}"
    if isinstance(experts, W4Experts):
        stock = "torch's operations, dequantising one expert at a time"
        path = stock if experts.repacked is None else "Redraft's GPU kernels"
    return {"experts": path, "attention": f"transformers' {model.config._attn_implementation}"}


def needed_bytes(arms: Sequence[Arm], files: dict[str, CheckpointFiles], dtype: torch.dtype) -> int:
    """Estimate of the memory that these arms take when all are loaded at once, and one of them answers."""
    holders = {arm.holder for arm in arms}
    total = 0
    for name, runner, weights in holders:
        config, spec = files[name].config, files[name].spec or QuantSpec()
        total += weight_bytes(config, spec if weights == "w4" else None, dtype)
        if (runner, weights) == ("transformers", "w4") and (name, runner, "bf16") in holders:
            total -= _unpacked_bytes(config, dtype)  # they share all but the experts
    working = max(4 * files[arm.model].config.canvas_length * files[arm.model].config.vocab_size for arm in arms)
    return total + WORKING_LOGITS * working


def _unpacked_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return dtype.itemsize * sum(math.prod(shape) for _, shape in text_tensors(config).values())
