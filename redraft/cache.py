"""The KV arena: keys and values of everything committed, preallocated once per batch.

Full layers keep every row. Sliding layers keep the last `window - 1` rows, which is all that a later position or a
canvas may see, plus room for one canvas so that most commits write in place. Rows of one layer are contiguous and in
order; row r of a layer holds the position `length - rows + r`.
"""

from __future__ import annotations

import torch

from redraft.config import ModelConfig
from redraft.errors import UsageError

KV = tuple[torch.Tensor, torch.Tensor]


class LayerCache:
    """Keys and values of one layer, [B, kv_heads, rows, D]."""

    def __init__(self, shape: tuple[int, int, int, int], window: int | None, dtype: torch.dtype, device: torch.device):
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.window = window
        self.rows = 0

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> KV:
        """Store new rows and return all rows they may attend to, the new ones last."""
        total = self.rows + keys.shape[2]
        if total <= self.keys.shape[2]:
            self.keys[:, :, self.rows : total] = keys
            self.values[:, :, self.rows : total] = values
            self.rows = total
            return self.keys[:, :, :total], self.values[:, :, :total]
        assert self.window is not None, "a full layer outgrew the arena"
        keys = torch.cat((self.keys[:, :, : self.rows], keys), dim=2)
        values = torch.cat((self.values[:, :, : self.rows], values), dim=2)
        self.rows = self.window - 1
        self.keys[:, :, : self.rows] = keys[:, :, -self.rows :]
        self.values[:, :, : self.rows] = values[:, :, -self.rows :]
        return keys, values

    def prefix(self) -> KV:
        """The stored rows a canvas may see."""
        first = 0 if self.window is None else max(0, self.rows - (self.window - 1))
        return self.keys[:, :, first : self.rows], self.values[:, :, first : self.rows]


class KVArena:
    """All layers' caches for a batch of sequences of equal length, shorter prompts padded on the left.

    `padding` int64 [B] counts each row's left padding; positions below it are never attended to.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        padding: torch.Tensor | None = None,
    ):
        self.capacity = capacity
        self.length = 0
        self.padding = padding if padding is not None and bool(padding.any()) else None
        self.layers = [
            LayerCache(
                (batch, layer.num_kv_heads, rows, layer.head_dim),
                config.sliding_window if layer.kind == "sliding" else None,
                dtype,
                device,
            )
            for layer, rows in zip(config.layers, layer_rows(config, capacity), strict=True)
        ]

    def advance(self, count: int) -> None:
        """Count `count` more committed positions, after every layer has stored them."""
        self.length += count


def layer_rows(config: ModelConfig, capacity: int) -> list[int]:
    """Rows each layer's cache needs for `capacity` positions."""
    sliding = min(capacity, config.sliding_window - 1 + config.canvas_length)
    return [sliding if layer.kind == "sliding" else capacity for layer in config.layers]


def arena_bytes(config: ModelConfig, batch: int, capacity: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values for `capacity` positions of `batch` sequences."""
    rows = layer_rows(config, capacity)
    per_row = (2 * layer.num_kv_heads * layer.head_dim * dtype.itemsize for layer in config.layers)
    return batch * sum(r * p for r, p in zip(rows, per_row, strict=True))


def check_context(config: ModelConfig, prompt: int, new: int) -> None:
    """Raise UsageError with the numbers when prompt and answer do not fit the model's context."""
    if prompt + new > config.max_position_embeddings:
        raise UsageError(
            f"prompt of {prompt} tokens plus {new} new tokens exceeds the context of {config.max_position_embeddings}; "
            "shorten the prompt or lower max_new_tokens"
        )
