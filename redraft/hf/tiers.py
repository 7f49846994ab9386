"""What a tier changes inside transformers' `generate`, and static caches without torch.compile."""

from __future__ import annotations

from types import MethodType
from typing import Any

from redraft.config import Tier
from redraft.hf.generate import generate
from redraft.hf.network import OwnLoop, no_kernels, obstacle
from redraft.hf.sampling import EntropyOnceSampler, stopping_criteria

_FUSED = {
    "norms": "fused with residual sums, routing and the sum over a row's experts, in passes that are CUDA graphs",
    "QKV": "one product a layer on joined weights",
    "sampling": "draw, argmax, entropy and self-conditioning in launches over the vocabulary",
}


def install(model: Any, tier: Tier) -> tuple[dict[str, str], dict[str, str]]:
    """Make `model.generate` run a tier, whatever tier ran before.

    Returns what was replaced by what, and what was kept and why.
    """
    replaced: dict[str, str] = {}
    kept = {"torch.compile": "not used with static caches: experts count their rows, which full graphs forbid"}
    model._compile_functions = MethodType(_run_uncompiled, model)
    for name in ("_prepare_sampler", "_prepare_diffusion_stopping_criteria", "generate"):
        model.__dict__.pop(name, None)
    if (loop := model.__dict__.pop("_redraft_loop", None)) is not None:
        loop.close()
    if tier == "off":
        kept["entropy"] = "computed twice a pass as in transformers; tiers bitexact and turbo compute it once"
    else:
        model._prepare_sampler = MethodType(EntropyOnceSampler, model)
        model._prepare_diffusion_stopping_criteria = MethodType(stopping_criteria, model)
        replaced["entropy"] = "computed once a pass for acceptance and stop test; the same tokens"
    if tier == "turbo":
        _run_on_loop(model, replaced, kept)
    else:
        kept["norms, QKV and sampling"] = "transformers' own; tier turbo runs Redraft's loop"
    return replaced, kept


def _run_on_loop(model: Any, replaced: dict[str, str], kept: dict[str, str]) -> None:
    model._redraft_loop, model.generate = OwnLoop(), MethodType(generate, model)
    if (reason := obstacle(model)) is not None:
        kept["generate"] = f"transformers' own, because {reason}"
        kept["norms, QKV and sampling"] = f"transformers' own, because {reason}"
        return
    replaced["generate"] = "Redraft's loop over the model's own weights: other tokens than the other tiers'"
    kept["generate of what the loop does not know"] = "transformers' own; a warning says why"
    if (reason := no_kernels(model)) is not None:
        kept["norms, QKV and sampling"] = f"torch's operations, because {reason}"
    else:
        replaced.update(_FUSED, entropy="computed once a pass, with the sampling")


def _run_uncompiled(model: Any, sampler: Any, stopping: Any) -> tuple[Any, Any, Any, Any]:
    """In place of `_compile_functions`: what a static cache compiles, as it is.

    Packed experts read how many rows each expert has, which `fullgraph` forbids; and the compiled sampler would keep
    the entropy bound of the first call.
    """
    return model.model.encoder, model.forward, sampler, stopping
