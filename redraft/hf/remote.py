"""The class that a checkpoint with its own code names in `auto_map`: packed experts and tiers, Redraft not installed.

    AutoModelForMultimodalLM.from_pretrained(PATH, trust_remote_code=True, tier="turbo")

`redraft export --remote-code` writes this module, and those it needs, beside the weights. An installed Redraft may be
of another version: each copy loads its own classes, and leaves transformers' registry as it found it.
"""

from __future__ import annotations

from typing import Any

from transformers import DiffusionGemmaForBlockDiffusion
from transformers.quantizers import auto

from redraft.config import TIERS, Tier, check_choice
from redraft.hf.experts import adopt_kernels
from redraft.hf.quantizer import W4Config, W4Quantizer
from redraft.hf.tiers import install
from redraft.store.dg_w4a16 import FORMAT


class RedraftDiffusionGemma(DiffusionGemmaForBlockDiffusion):
    """transformers' DiffusionGemma with experts in 4 bits."""

    _auto_class = "AutoModelForMultimodalLM"  # with which `save_pretrained` writes the code again

    @classmethod
    def from_pretrained(cls, *args: Any, tier: Tier = "turbo", **kwargs: Any) -> Any:
        """transformers' `from_pretrained`, and then `set_tier(tier)`. Raises UsageError for an unknown tier."""
        check_choice("tier", tier, TIERS)
        tables: tuple[dict[str, Any], ...] = (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING)
        before = [{FORMAT: table[FORMAT]} if FORMAT in table else {} for table in tables]
        try:
            for table, own in zip(tables, (W4Config, W4Quantizer), strict=True):
                table[FORMAT] = own
            loaded = super().from_pretrained(*args, **kwargs)
        finally:
            for table, found in zip(tables, before, strict=True):
                table.pop(FORMAT, None)
                table.update(found)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.set_tier(tier)
        return loaded

    def set_tier(self, tier: Tier) -> tuple[dict[str, str], dict[str, str]]:
        """Make `generate` run the tier `off`, `bitexact` or `turbo`; returns what was replaced, and what was not."""
        check_choice("tier", tier, TIERS)
        adopt_kernels(self)
        return install(self, tier)
