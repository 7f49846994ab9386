"""The format that transformers saves: a layer's experts as two tensors in BF16, fp16 or fp32."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from redraft.config import ModelConfig
from redraft.network.weights import DenseExperts
from redraft.store.format import Entry, Format, Read
from redraft.store.names import FLOATS, expert_names


@dataclass(frozen=True)
class Bf16(Format):
    """Experts that are not packed: gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""

    name = "bf16"
    spec = None

    @classmethod
    def describe(cls, path: Path, quantization: Mapping[str, Any] | None, config: ModelConfig) -> Self:
        return cls()

    def expected(self, config: ModelConfig, layer: int) -> dict[str, Entry]:
        e, h, i = config.num_experts, config.hidden_size, config.moe_intermediate_size
        return dict(zip(expert_names(layer), ((FLOATS, (e, 2 * i, h)), (FLOATS, (e, h, i))), strict=True))

    def read_layer(self, read: Read, config: ModelConfig, layer: int, where: str) -> DenseExperts:
        return DenseExperts(*map(read, expert_names(layer)))
