"""The cache that the loop's `generate` returns."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache

from redraft.errors import RedraftError


class TokenCache(DynamicCache):
    """Which tokens are committed, int64 [B, N], and which of them are no padding, bool [B, N].

    Given to the same model's `generate` again it is all that the loop needs. Whoever asks for keys and values gets
    them as transformers computes them: from then on this is a cache like any other, and `tokens` is None.
    """

    tokens: torch.Tensor | None = None

    def __init__(self, model: Any, tokens: torch.Tensor, mask: torch.Tensor):
        super().__init__(config=model.config.get_text_config(decoder=True))
        self.model, self.tokens, self.mask = ref(model), tokens, mask

    @property
    def layers(self) -> Any:
        if self.tokens is not None:
            self._encode()
        return self._layers

    @layers.setter
    def layers(self, value: Any) -> None:
        self._layers = value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(layer_idx) if self.tokens is None else self.tokens.shape[1]

    def __repr__(self) -> str:
        return super().__repr__() if self.tokens is None else f"TokenCache(tokens={tuple(self.tokens.shape)})"

    def _encode(self) -> None:
        model, tokens = self.model(), self.tokens
        if model is None:
            raise RedraftError("keys and values of this cache are not computed yet, and its model is gone")
        self.tokens = None
        devices = [model.device] if model.device.type == "cuda" else []
        # Whatever the version calls its arguments inside, `generate` knows how to read a prompt into a cache.
        with torch.random.fork_rng(devices):
            DiffusionGemmaForBlockDiffusion.generate(
                model, tokens, self, attention_mask=self.mask, max_new_tokens=1, max_denoising_steps=1,
                cache_implementation=None,
            )  # fmt: skip
