"""What a tier changes inside transformers' `generate`, and static caches without torch.compile."""

from __future__ import annotations

from types import MethodType
from typing import Any

from redraft.config import DecodeSettings, Tier
from redraft.hf.entropy_once import EntropyOnceSampler, EntropyOnceStopping
from redraft.hf.layers import fuse_norms, join_projections, obstacle, restore
from redraft.hf.sampling import FusedSampler, denoising_step

_HOOKS = ("_prepare_sampler", "_prepare_diffusion_stopping_criteria", "_denoising_step")


def install(model: Any, tier: Tier) -> tuple[dict[str, str], dict[str, str]]:
    """Make `model.generate` run a tier, whatever tier ran before.

    Returns what was replaced by what, and what was kept and why.
    """
    replaced: dict[str, str] = {}
    kept = {"torch.compile": "not used with static caches: experts count their rows, which full graphs forbid"}
    model._compile_functions = MethodType(_run_uncompiled, model)
    for name in _HOOKS:
        model.__dict__.pop(name, None)
    restore(model)
    fused = tier == "turbo" and _fuse(model, replaced, kept)
    if tier != "turbo":
        kept["norms, QKV and sampling"] = "transformers' own; tier turbo fuses them"
    if tier == "off":
        kept["entropy"] = "computed twice a pass as in transformers; tiers bitexact and turbo compute it once"
    else:
        _set_hooks(model, fused)
        replaced["entropy"] = "computed once a pass for acceptance and stop test; the same tokens"
    if fused:
        replaced["entropy"] = "computed once a pass, with the sampling"
    return replaced, kept


def _fuse(model: Any, replaced: dict[str, str], kept: dict[str, str]) -> bool:
    reason = obstacle(model)
    if reason is not None:
        kept["norms, QKV and sampling"] = f"transformers' own, because {reason}"
        return False
    replaced["norms"] = f"{fuse_norms(model)} norms and layers, with residual sums and routing, run by GPU kernels"
    reason = join_projections(model)
    if reason is None:
        replaced["QKV"] = "one product a layer on joined weights"
    else:
        kept["QKV"] = f"separate products, because of {reason}"
    replaced["sampling"] = "draw, argmax, entropy and self-conditioning in two launches over the vocabulary"
    kept["sampling with the caller's own logits processors"] = "transformers' own, in calls that pass some"
    return True


def _set_hooks(model: Any, fused: bool) -> None:
    model._prepare_sampler = MethodType(_prepare_fused_sampler if fused else _prepare_entropy_once_sampler, model)
    model._prepare_diffusion_stopping_criteria = MethodType(_prepare_diffusion_stopping_criteria, model)
    if fused:
        model._denoising_step = MethodType(denoising_step, model)


def _prepare_entropy_once_sampler(model: Any, generation_config: Any) -> EntropyOnceSampler:
    return _prepare(EntropyOnceSampler, generation_config.sampler_config, model, generation_config)


def _prepare_fused_sampler(model: Any, generation_config: Any) -> EntropyOnceSampler:
    return _prepare(FusedSampler, generation_config, model, generation_config)


def _prepare(kind: type[EntropyOnceSampler], config: Any, model: Any, generation_config: Any) -> EntropyOnceSampler:
    sampler = kind(
        config,
        canvas_length=model.config.canvas_length,
        vocab_size=model.config.text_config.vocab_size,
        max_denoising_steps=generation_config.max_denoising_steps,
    )
    # Each call has a generation config of its own, so calls in several threads do not meet.
    generation_config._entropy_sampler = sampler
    return sampler


def _prepare_diffusion_stopping_criteria(model: Any, generation_config: Any) -> EntropyOnceStopping | None:
    stability, confidence = generation_config.stability_threshold, generation_config.confidence_threshold
    if stability is None or confidence is None:
        return None
    settings = DecodeSettings(stability_threshold=stability, confidence_threshold=confidence)
    return EntropyOnceStopping(settings, generation_config._entropy_sampler)


def _run_uncompiled(model: Any, sampler: Any, stopping: Any) -> tuple[Any, Any, Any, Any]:
    """In place of `_compile_functions`: what a static cache compiles, as it is.

    Packed experts read how many rows each expert has, which `fullgraph` forbids; and the compiled sampler would keep
    the entropy bound of the first call.
    """
    return model.model.encoder, model.forward, sampler, stopping
