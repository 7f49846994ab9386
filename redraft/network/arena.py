"""The KV arena: keys and values of everything committed, preallocated.

Full layers keep every row. Sliding layers keep the last `window - 1` rows, which is all that a later position or a
canvas may see, plus room for one canvas so that most commits write in place. Rows of one layer are contiguous and in
order; row r of a layer holds the position `length - rows + r`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from redraft.config import ModelConfig
from redraft.errors import UsageError
from redraft.kernels.attention import attention

KV = tuple[torch.Tensor, torch.Tensor]


class LayerCache:
    """Keys and values of one layer, [B, kv_heads, rows, D]."""

    def __init__(self, shape: tuple[int, int, int, int], window: int | None, dtype: torch.dtype, device: torch.device):
        self.keys, self.values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        self.window, self.rows = window, 0

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> KV:
        """Store new rows and return all rows they may attend to, the new ones last."""
        total = self.rows + keys.shape[2]
        if total <= self.keys.shape[2]:
            self.keys[:, :, self.rows : total], self.values[:, :, self.rows : total] = keys, values
            self.rows = total
            return self.keys[:, :, :total], self.values[:, :, :total]
        assert self.window is not None, "a full layer outgrew the arena"
        keys = torch.cat((self.keys[:, :, : self.rows], keys), dim=2)
        values = torch.cat((self.values[:, :, : self.rows], values), dim=2)
        self.rows = self.window - 1
        self.keys[:, :, : self.rows] = keys[:, :, -self.rows :]
        self.values[:, :, : self.rows] = values[:, :, -self.rows :]
        return keys, values

    def grow(self, rows: int) -> None:
        """Room for `rows` rows; those stored stay."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(*old.shape[:2], max(rows, old.shape[2]), old.shape[3])
            new[:, :, : self.rows] = old[:, :, : self.rows]
            setattr(self, name, new)

    def prefix(self) -> KV:
        """The stored rows a canvas may see."""
        first = 0 if self.window is None else max(0, self.rows - (self.window - 1))
        return self.keys[:, :, first : self.rows], self.values[:, :, first : self.rows]

    def with_own(self, keys: torch.Tensor, values: torch.Tensor) -> KV:
        """What a canvas attends to: `prefix` and then its own rows. Nothing is stored."""
        prefix_keys, prefix_values = self.prefix()
        return torch.cat((prefix_keys, keys), dim=2), torch.cat((prefix_values, values), dim=2)


class KVArena:
    """All layers' caches for a batch of sequences of equal length, shorter prompts padded on the left.

    `padding` int64 [B] counts each row's left padding; positions below it are never attended to.
    """

    def __init__(
        self, config: ModelConfig, batch: int, capacity: int, dtype: torch.dtype, device: torch.device,
        padding: torch.Tensor | None = None,
    ):  # fmt: skip
        self._config, self._device = config, device
        self.batch, self.capacity, self.length = batch, capacity, 0
        self.padding = padding if padding is not None and bool(padding.any()) else None
        self.layers = []
        for layer, rows in zip(config.layers, layer_rows(config, capacity), strict=True):
            window = config.sliding_window if layer.kind == "sliding" else None
            shape = (batch, layer.num_kv_heads, rows, layer.head_dim)
            self.layers.append(LayerCache(shape, window, dtype, device))

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` positions, keeping what is stored."""
        if capacity <= self.capacity:
            return
        self.capacity = capacity
        for cache, rows in zip(self.layers, layer_rows(self._config, capacity), strict=True):
            cache.grow(rows)

    def positions(self, count: int) -> torch.Tensor:
        """Where the next `count` tokens stand, int64 [count]."""
        return torch.arange(self.length, self.length + count, device=self._device)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        """Attention of new rows over a layer's stored rows and themselves; q, k, v [B, heads, N, D].

        causal: the rows are stored, and none sees a later one or one outside of a sliding layer's window. Otherwise the
        arena stays as it is, and every row sees all that a canvas may. Returns [B, N, heads * D].
        """
        cache, count = self.layers[layer], q.shape[2]
        if causal:
            mask = self._causal_mask(cache, count)
            return attention(q, *cache.extend(k, v), mask)
        k, v = cache.with_own(k, v)
        return attention(q, k, v, self._padding_mask(k.shape[2], count))

    def advance(self, count: int) -> None:
        """Count `count` more committed positions, after every layer has stored them."""
        self.length += count

    def _causal_mask(self, cache: LayerCache, count: int) -> torch.Tensor:
        """bool [1 or B, 1, count, keys]: at or before the query, inside the window, not padding."""
        keys = torch.arange(self.length - cache.rows, self.length + count, device=self._device)
        queries = self.positions(count)[:, None]
        visible = keys <= queries
        if cache.window is not None:
            visible = visible & (queries - keys < cache.window)
        visible = visible[None, None]
        if self.padding is not None:
            # A padding row sees itself, so that its (unread) output stays finite.
            visible = visible & ((keys >= self.padding[:, None, None, None]) | (keys == queries))
        return visible

    def _padding_mask(self, keys: int, count: int) -> torch.Tensor | None:
        """bool [B, 1, 1, keys] hiding left padding, or None when there is none. The last `count` keys are new."""
        if self.padding is None:
            return None
        end = self.length + count
        return (torch.arange(end - keys, end, device=self._device) >= self.padding[:, None])[:, None, None, :]


class PackedArenas:
    """Arenas of one sequence each behind one row of tokens, in which their pieces of `counts` tokens stand in order.

    A pass over them works row by row on all pieces at once; in attention each piece has its own arena and length.
    """

    def __init__(self, arenas: Sequence[KVArena], counts: Sequence[int]):
        self._arenas, self._counts = list(arenas), list(counts)

    def positions(self, count: int) -> torch.Tensor:
        """As of KVArena, for a row of `count` tokens in all."""
        assert count == sum(self._counts), "the pieces are not the row"
        return torch.cat([arena.positions(own) for arena, own in zip(self._arenas, self._counts, strict=True)])

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        """As of KVArena, each piece in its own; q, k, v [1, heads, N, D]."""
        pieces = zip(self._arenas, *(rows.split(self._counts, dim=2) for rows in (q, k, v)), strict=True)
        return torch.cat([arena.attend(layer, *piece, causal=causal) for arena, *piece in pieces], dim=1)

    def advance(self, count: int) -> None:
        """As of KVArena, after a row of `count` tokens in all."""
        for arena, own in zip(self._arenas, self._counts, strict=True):
            arena.advance(own)


Arena = KVArena | PackedArenas


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


@dataclass
class SlotLayer:
    """One layer of a SlotArena: keys and values [slots, kv_heads, rows_cap + in flight, D].

    Rows below rows_cap hold the committed prefix, the rest is where a pass writes its own rows. On sliding layers the
    prefix is a ring of window - 1 rows, position p in row p % rows_cap: exactly what a canvas may see.
    """

    keys: torch.Tensor
    values: torch.Tensor
    rows_cap: int
    ring: bool


@dataclass
class SlotArena:
    """The arena of fused passes: slots of their own lengths, nothing padded, nothing concatenated."""

    layers: list[SlotLayer]
    length: torch.Tensor  # int32 [slots], on the device: each slot's committed positions

    @classmethod
    def allocate(
        cls, config: ModelConfig, slots: int, capacity: int, in_flight: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Room for `slots` requests of `capacity` positions and for passes of `in_flight` rows a slot."""
        layers = []
        for layer in config.layers:
            ring = layer.kind == "sliding"
            rows_cap = config.sliding_window - 1 if ring else capacity
            shape = (slots, layer.num_kv_heads, rows_cap + in_flight, layer.head_dim)
            # Zeros: rows that no pass has written are masked, and a masked NaN would still spread.
            keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
            layers.append(SlotLayer(keys, values, rows_cap, ring))
        return cls(layers, torch.zeros(slots, dtype=torch.int32, device=device))
