"""What a tier changes inside transformers' `generate`, and static caches without torch.compile."""

from __future__ import annotations

from types import MethodType
from typing import Any

from redraft.config import Tier
from redraft.hf.layers import fuse_norms, join_projections, obstacle, restore
from redraft.hf.sampling import EntropyOnceSampler, FusedSampler, denoising_step, stopping_criteria


def install(model: Any, tier: Tier) -> tuple[dict[str, str], dict[str, str]]:
    """Make `model.generate` run a tier, whatever tier ran before.

    Returns what was replaced by what, and what was kept and why.
    """
    replaced: dict[str, str] = {}
    kept = {"torch.compile": "not used with static caches: experts count their rows, which full graphs forbid"}
    model._compile_functions = MethodType(_run_uncompiled, model)
    for name in ("_prepare_sampler", "_prepare_diffusion_stopping_criteria", "_denoising_step"):
        model.__dict__.pop(name, None)
    restore(model)
    if tier == "off":
        kept["entropy"] = "computed twice a pass as in transformers; tiers bitexact and turbo compute it once"
    else:
        model._prepare_sampler = MethodType(EntropyOnceSampler, model)
        model._prepare_diffusion_stopping_criteria = MethodType(stopping_criteria, model)
        replaced["entropy"] = "computed once a pass for acceptance and stop test; the same tokens"
    if tier != "turbo":
        kept["norms, QKV and sampling"] = "transformers' own; tier turbo fuses them"
    elif (reason := obstacle(model)) is not None:
        kept["norms, QKV and sampling"] = f"transformers' own, because {reason}"
    else:
        _fuse(model, replaced, kept)
    return replaced, kept


def _fuse(model: Any, replaced: dict[str, str], kept: dict[str, str]) -> None:
    model._prepare_sampler = MethodType(FusedSampler, model)
    model._denoising_step = MethodType(denoising_step, model)
    replaced["entropy"] = "computed once a pass, with the sampling"
    replaced["norms"] = f"{fuse_norms(model)} norms and layers, with residual sums and routing, run by GPU kernels"
    reason = join_projections(model)
    if reason is None:
        replaced["QKV"] = "one product a layer on joined weights"
    else:
        kept["QKV"] = f"separate products, because of {reason}"
    replaced["sampling"] = "draw, argmax, entropy and self-conditioning in two launches over the vocabulary"
    kept["sampling with the caller's own logits processors"] = "transformers' own, in calls that pass some"


def _run_uncompiled(model: Any, sampler: Any, stopping: Any) -> tuple[Any, Any, Any, Any]:
    """In place of `_compile_functions`: what a static cache compiles, as it is.

    Packed experts read how many rows each expert has, which `fullgraph` forbids; and the compiled sampler would keep
    the entropy bound of the first call.
    """
    return model.model.encoder, model.forward, sampler, stopping
