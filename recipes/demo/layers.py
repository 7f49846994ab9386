"""What training changes around transformers' modules: experts as dense products, embeddings as products, cache, masks.

The functions computed are transformers' own. Gather and scatter with many repeated indices (token ids, expert ids) have
slow backward passes on a GPU, and plain products of this size do not; that is the only reason.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from recipes.demo.data import CANVAS, ROW

DENSE_EXPERTS = "redraft_dense"
ROUNDING_GROUPS = (128, 64)  # input elements that share a 4-bit scale: gate/up, down


def rounding_noise(weight: Tensor, group: int) -> Tensor:
    """`weight` with the error of 4-bit storage: uniform within one of 15 steps of each group's range. [..., in]."""
    grouped = weight.detach().unflatten(-1, (-1, group))
    step = (grouped.amax(-1, keepdim=True) - grouped.amin(-1, keepdim=True)) / 15
    return weight + ((torch.rand_like(grouped) - 0.5) * step).flatten(-2)


def dense_experts(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Every expert on every token, the unselected ones with weight zero. hidden [N, H]; index, weights [N, top_k].

    Sixteen small experts cost less this way than sorting tokens by expert. The noise teaches the network to bear 4-bit
    expert weights.
    """
    gate_up, down = (
        rounding_noise(w, group)
        for w, group in zip((experts.gate_up_proj, experts.down_proj), ROUNDING_GROUPS, strict=True)
    )
    share = torch.zeros(len(hidden), len(gate_up), dtype=hidden.dtype, device=hidden.device)
    share = share.scatter(1, index, weights.to(hidden.dtype))
    gate, up = F.linear(hidden, gate_up.flatten(0, 1)).unflatten(-1, (len(gate_up), -1)).chunk(2, dim=-1)
    inner = experts.act_fn(gate) * up * share[..., None]
    return F.linear(inner.flatten(1), down.transpose(0, 1).flatten(1))


ALL_EXPERTS_FUNCTIONS.register(DENSE_EXPERTS, dense_experts)


def embed_by_product(embedding: Any) -> None:
    """Make an embedding look up rows by a product with one-hot vectors; padding then learns like any token."""

    def forward(ids: Tensor) -> Tensor:
        weight = embedding.weight
        one_hot = ids[..., None] == torch.arange(len(weight), device=ids.device)
        return (one_hot.to(weight.dtype) @ weight) * embedding.embed_scale.to(weight.dtype)

    embedding.forward = forward


class PrefixLayer:
    """Keys and values of one layer, [B, KV heads, ROW, head_dim] each."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values


class PrefixCache:
    """The least a DiffusionGemma pass needs of a cache: keys and values of one encoder pass, gradients included.

    Sliding layers keep the whole prefix here; the masks apply the window instead.
    """

    is_compileable = False

    def __init__(self, layers: list[PrefixLayer]) -> None:
        self.layers = layers

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **_: Any) -> tuple[Tensor, Tensor]:
        self.layers.append(PrefixLayer(keys, values))
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.layers[layer_idx].keys.shape[-2]) if self.layers else 0

    def head(self, rows: int) -> PrefixCache:
        """The first `rows` rows, without gradients."""
        return PrefixCache([PrefixLayer(x.keys[:rows].detach(), x.values[:rows].detach()) for x in self.layers])


def encoder_masks(window: int, device: torch.device) -> dict[str, Tensor]:
    """Boolean [1, 1, ROW, ROW]: causal, and causal within the window. Right padding needs no mask of its own."""
    i = torch.arange(ROW, device=device)
    causal = i[:, None] >= i[None, :]
    near = causal & (i[:, None] - i[None, :] < window)
    return {"full_attention": causal[None, None], "sliding_attention": near[None, None]}


def decoder_masks(start: Tensor, window: int) -> dict[str, Tensor]:
    """Boolean [B, 1, CANVAS, ROW + CANVAS]: all of the canvas, and the prefix before `start` [B].

    Sliding layers see the last window - 1 prefix tokens, which is what the cache of a generation still holds.
    """
    i = torch.arange(ROW, device=start.device)
    before = i[None, :] < start[:, None]
    near = before & (i[None, :] > start[:, None] - window)

    def widen(prefix: Tensor) -> Tensor:
        return F.pad(prefix, (0, CANVAS), value=True)[:, None, None, :].expand(-1, 1, CANVAS, -1)

    return {"full_attention": widen(before), "sliding_attention": widen(near)}
