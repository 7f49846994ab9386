"""The class that a checkpoint with its own code names in `auto_map`: packed experts and tiers, Redraft not installed.

    AutoModelForMultimodalLM.from_pretrained(PATH, trust_remote_code=True, tier="turbo")

`redraft export --remote-code` writes this module, and those it needs, beside the weights.
"""

from __future__ import annotations

from typing import Any

from transformers import DiffusionGemmaForBlockDiffusion

from redraft.config import TIERS, Tier, check_choice
from redraft.hf.experts import layers, set_ties
from redraft.hf.generation import install
from redraft.hf.method import own_method

with own_method():
    from redraft.hf.quantizer import W4Config, W4Quantizer


class RedraftDiffusionGemma(DiffusionGemmaForBlockDiffusion):
    """transformers' DiffusionGemma with experts in 4 bits."""

    _auto_class = "AutoModelForMultimodalLM"  # with which `save_pretrained` writes the code again

    @classmethod
    def from_pretrained(cls, *args: Any, tier: Tier = "turbo", **kwargs: Any) -> Any:
        """transformers' `from_pretrained`, and then `set_tier(tier)`. Raises UsageError for an unknown tier."""
        check_choice("tier", tier, TIERS)
        with own_method(W4Config, W4Quantizer):
            loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.set_tier(tier)
        return loaded

    def set_tier(self, tier: Tier) -> tuple[dict[str, str], dict[str, str]]:
        """Make `generate` run the tier `off`, `bitexact` or `turbo`; returns what was replaced, and what was not."""
        check_choice("tier", tier, TIERS)
        for layer, _ in layers(self):
            layer.experts.adopt_kernels(self.dtype)  # the model may have moved to a GPU since
        set_ties(self)
        return install(self, tier)
