"""What answers for an arm: transformers' `generate` or Redraft's engine, loaded once and shared between arms.

The W4 model of transformers is made in this process of the BF16 one: modules of its own around the same tensors, and
packed experts in the place of the dense ones. Where memory does not suffice for both it is packed in place.
"""

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from redraft.config import DecodeSettings, QuantSpec, Tier, WeightFormat
from redraft.device import peak_bytes
from redraft.engine.events import Result, count_tokens, cut
from redraft.errors import UsageError
from redraft.evaluate.arms import Arm
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
        self._loaded: dict[tuple[str, WeightFormat | None, Tier | None], Any] = {}  # tier None: an engine

    def open(self, arm: Arm) -> Side:
        """Load what answers for an arm, or make it of what is loaded. Raises RedraftError."""
        if arm.runner == "transformers":
            model, files = self._transformers(arm.model, arm.weights, arm.tier), self.files[arm.model]
            answer = TransformersEngine(model, load_tokenizer(files.path), files.settings).generate_batch
            return Side(arm.name, answer, self.device, weight_bytes=model_bytes(model), about=_about(model))
        from redraft import load

        key = (arm.model, arm.weights, None)
        if key not in self._loaded:
            self._loaded[key] = load(arm.model, weights=arm.weights, device=str(self.device), dtype=self.dtype)
        engine = self._loaded[key]
        how = "fused kernels as CUDA graphs" if engine.fused and arm.tier == "turbo" else "torch's operations"
        with_tier = partial(engine.generate_batch, tier=arm.tier)
        return Side(arm.name, with_tier, self.device, weight_bytes=engine.weight_bytes, about={"passes": how})

    def close(self, following: Sequence[Arm]) -> None:
        """Let go of everything but BF16 models that the following arms are made of in place."""
        sources = {(arm.model, "bf16", "off") for arm in following if arm.runner == "transformers"}
        self._loaded = {key: model for key, model in self._loaded.items() if key in sources}
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _transformers(self, name: str, weights: WeightFormat | None, tier: Tier) -> Any:
        from redraft.hf.experts import twin

        key, bf16 = (name, weights, tier), (name, "bf16", "off")
        if key not in self._loaded:
            if tier != "off":
                model = twin(self._transformers(name, weights, "off"))
                _set_tier(model, weights, tier)
            elif weights == "w4" and bf16 in self._loaded:
                model = self._loaded.pop(bf16) if self.in_place else twin(self._loaded[bf16])
                _set_tier(model, weights, "off")
            else:
                model = self._from_pretrained(name, weights)
            self._loaded[key] = model
        return self._loaded[key]

    def _from_pretrained(self, name: str, weights: WeightFormat | None) -> Any:
        """transformers' model by its own `from_pretrained`; experts packed while loading for w4."""
        from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

        from redraft.bench.rivals import transformers_config
        from redraft.hf import W4Config

        # Its own placement needs the library accelerate; without it weights take the way over the host's memory.
        options: dict[str, Any] = {"dtype": self.dtype}
        if self.device.type != "cpu" and find_spec("accelerate"):
            options["device_map"] = {"": self.device}
        files, random = self.files[name], is_random(name)
        if random:
            options["config"] = transformers_config(files.config)
            options["state_dict"] = random_tensors(name, self.device, self.dtype)
        elif files.format == compressed_tensors.FORMAT:  # by our method, not by transformers' own of that name
            options["config"] = DiffusionGemmaConfig.from_pretrained(files.path)
            options["config"].quantization_config = W4Config().to_dict()
        elif weights == "w4":
            options["quantization_config"] = W4Config()
        model: Any = DiffusionGemmaForBlockDiffusion.from_pretrained(None if random else files.path, **options)
        model = model.to(self.device).eval()
        if random and weights == "w4":
            _set_tier(model, "w4", "off")
        return model


def _set_tier(model: Any, weights: WeightFormat | None, tier: Tier) -> None:
    from redraft.hf import accelerate
    from redraft.hf.tiers import install

    if weights == "w4":
        accelerate(model, tier)
    else:
        install(model, tier)


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
    attention = f"transformers' {model.config._attn_implementation}"
    return {"experts": path, "attention": "Redraft's, in its loop" if "generate" in vars(model) else attention}


def needed_bytes(arms: Sequence[Arm], files: dict[str, CheckpointFiles], dtype: torch.dtype) -> int:
    """Estimate of the memory that these arms take when all are loaded at once, and one of them answers."""
    holders = {arm.holder for arm in arms}
    total = 0
    for name, runner, weights in holders:
        config, spec = files[name].config, files[name].spec or QuantSpec()
        total += weight_bytes(config, spec if weights == "w4" else None, dtype)
        if (runner, weights) == ("transformers", "w4") and (name, runner, "bf16") in holders:  # they share the rest
            total -= dtype.itemsize * sum(math.prod(shape) for _, shape in text_tensors(config).values())
    configs = [files[arm.model].config for arm in arms]
    return total + WORKING_LOGITS * max(4 * config.canvas_length * config.vocab_size for config in configs)


class TransformersEngine:
    """transformers' `generate` behind the call of our engine, so that both answer and are counted alike."""

    def __init__(self, model: Any, tokenizer: Any, settings: DecodeSettings):
        self.model, self.tokenizer, self.settings = model, tokenizer, settings

    def generate_batch(self, prompts: Sequence[str], *, seed: Sequence[int], **settings: Any) -> list[Result]:
        """Answer user turns one after the other."""
        return [self.generate(prompt, seed=each, **settings) for prompt, each in zip(prompts, seed, strict=True)]

    def generate(self, prompt: str, *, seed: int, **settings: Any) -> Result:
        """Answer one user turn. Raises UsageError for settings that transformers refuses."""
        chosen = self.settings.replace(**settings)
        pad, options = self.model.config.text_config.pad_token_id or 0, generate_options(chosen)
        began = time.perf_counter()
        chat = [{"role": "user", "content": prompt}]
        encoded: Any = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        ids = torch.tensor([encoded["input_ids"]], device=self.model.device)
        torch.manual_seed(seed)
        with _count_passes(self.model) as (steps, streamer):
            output = self.model.generate(input_ids=ids, pad_token_id=pad, streamer=streamer, **options)
        answer = output.sequences[0, ids.shape[1] :].tolist()
        tokens, finish_reason = cut(answer, chosen.eos_token_ids, chosen.max_new_tokens)
        return Result(
            token_ids=tokens, tokens=count_tokens(tokens, pad), prompt_tokens=ids.shape[1], steps_per_canvas=steps,
            seconds=time.perf_counter() - began, finish_reason=finish_reason or "length", seed=seed,
            peak_memory_bytes=peak_bytes(self.model.device),
            text=str(self.tokenizer.decode(tokens, skip_special_tokens=True)),
        )  # fmt: skip


def generate_options(settings: DecodeSettings) -> dict[str, Any]:
    """Our settings as keywords of transformers' `generate`: all of them, whatever its generation config says."""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    if settings.t_max == settings.t_min:
        raise UsageError(f"t_max equals t_min ({settings.t_min:g}), which transformers refuses; raise t_max a little")
    return {
        "max_new_tokens": settings.max_new_tokens, "max_denoising_steps": settings.max_denoising_steps,
        "sampler_config": EntropyBoundSamplerConfig(entropy_bound=float(settings.entropy_bound)),
        "t_min": float(settings.t_min), "t_max": float(settings.t_max),
        "stability_threshold": settings.stability_threshold,
        "confidence_threshold": float(settings.confidence_threshold),
        "eos_token_id": list(settings.eos_token_ids) or None,
    }  # fmt: skip


class _Passes:
    """A streamer that counts the passes of each canvas."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._between = True  # the prompt is put before, and a canvas after its passes

    def put(self, value: torch.Tensor) -> None:
        self._between = True

    def put_draft(self, value: torch.Tensor) -> None:
        if self._between:
            self.steps.append(0)
        self._between = False
        self.steps[-1] += 1

    def end(self) -> None: ...


@contextmanager
def _count_passes(model: Any) -> Iterator[tuple[list[int], _Passes | None]]:
    """Denoising passes of each canvas: the encoder runs once before a canvas, the decoder once in a pass.

    Hooks and not a streamer, which would have every pass's canvas copied to the host and slow the model down. Redraft's
    loop has canvases there anyway, and obeys no hooks.
    """
    if "generate" in vars(model):
        passes = _Passes()
        yield passes.steps, passes
        return
    steps: list[int] = []

    def denoise(*_: Any) -> None:
        steps[-1] += 1

    inner = model.model
    with (
        inner.encoder.register_forward_pre_hook(lambda *_: steps.append(0)),
        inner.decoder.register_forward_pre_hook(denoise),
    ):
        yield steps, None
