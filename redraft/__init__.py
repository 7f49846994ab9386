"""Redraft: DiffusionGemma fast on one GPU, with experts that run in 4 bits.

>>> import redraft
>>> engine = redraft.load("demo")
>>> engine.generate("What is the capital of France?").text  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redraft.config import TIERS, DecodeSettings, QuantSpec, Tier, WeightFormat, check_choice, require_int
from redraft.errors import CheckpointError, RedraftError, UsageError
from redraft.registration import watch
from redraft.version import __version__

if TYPE_CHECKING:
    import torch

    from redraft.engine.engine import Engine
    from redraft.hf import W4Config, accelerate
    from redraft.quant.report import QuantReport

__all__ = [
    "CheckpointError", "DecodeSettings", "QuantSpec", "RedraftError", "UsageError", "W4Config", "__version__",
    "accelerate", "load", "quantize",
]  # fmt: skip


def load(
    model: str | Path, *, weights: WeightFormat | None = None, tier: Tier = "turbo", device: str | None = None,
    dtype: torch.dtype | None = None, spec: QuantSpec | None = None, slots: int | None = None,
    context: int | None = None, progress: Callable[[int, int], None] | None = None,
) -> Engine:  # fmt: skip
    """Load a checkpoint and return an engine.

    model: a directory, a hub id, "demo" for the bundled one, or random weights of a model's shapes, such as
    "random:26b-a4b" and "random:tiny" (redraft/store/random.py). weights: "w4" (default; BF16 experts are quantised
    layer by layer while loading, in groups of `spec`) or "bf16". device: "cuda" or "cpu", by default the GPU when
    there is one. dtype: of activations and of everything but packed experts; fp32 on a CPU, BF16 on a GPU. slots,
    context: requests side by side and positions of each (prompt and answer) that memory is taken for now; without them
    both follow what is asked for. progress(done, total) is called per layer. Raises CheckpointError, UsageError or
    MemoryShortage.
    """
    from redraft.device import default_dtype, pick_device
    from redraft.engine.engine import Engine
    from redraft.quant.load import load_checkpoint
    from redraft.store.open import load_tokenizer

    check_choice("tier", tier, TIERS)
    slots = None if slots is None else require_int("slots", slots, 1)
    context = None if context is None else require_int("context", context, 1)
    target = pick_device(device)
    dtype = dtype or default_dtype(target)
    checkpoint = load_checkpoint(model, weights, dtype, target, spec, progress)
    return Engine(checkpoint, load_tokenizer(checkpoint.path), tier, slots, context)


def quantize(
    src: str | Path, dst: str | Path, spec: QuantSpec | None = None, *, overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None, device: str | None = None,
) -> QuantReport:  # fmt: skip
    """Pack the experts of a BF16 checkpoint (directory or hub id) into a `dg-w4a16-v1` directory at `dst`.

    spec: group sizes, by default the published ones. Works layer by layer; called again after an interruption it goes
    on with the next layer. `dst` appears only when it is complete. Raises CheckpointError, UsageError or RedraftError.
    """
    from redraft.device import pick_device
    from redraft.quant.quantize import quantize as run

    return run(src, dst, spec, overwrite=overwrite, progress=progress, device=pick_device(device or "cpu"))


def __getattr__(name: str) -> Any:
    """`W4Config` and `accelerate` on first use: they need transformers, which `import redraft` alone does not load."""
    if name in ("W4Config", "accelerate"):
        import redraft.hf

        return getattr(redraft.hf, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


watch()
