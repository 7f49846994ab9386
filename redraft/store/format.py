"""What a checkpoint format is: how it stores the routed experts. Everything else is stored alike in all of them.

A new format is a subclass in a file of its own and an entry of `read.FORMATS`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from redraft.config import ModelConfig, QuantSpec
from redraft.network.weights import DenseExperts, PackedExperts
from redraft.store.names import text_tensors
from redraft.store.tensorfile import DTYPES, TensorInfo

Entry = tuple[tuple[str, ...], tuple[int, ...]]  # safetensors dtypes accepted, the first of which is written; shape
Read = Callable[[str], torch.Tensor]  # a tensor by canonical name, on the CPU, dtype as stored


def shard_names(count: int) -> list[str]:
    """transformers' names of `count` files that an index lists."""
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


class Format(ABC):
    """How one checkpoint stores its experts."""

    name: ClassVar[str]  # in reports, and `quant_method` in config.json where experts are packed
    fence: ClassVar[tuple[str, str] | None] = None  # file and name of an empty tensor that stops other loaders
    spec: QuantSpec | None  # group sizes; None when experts are not packed, and before `settled` where shapes tell them

    @classmethod
    @abstractmethod
    def describe(cls, path: Path, quantization: Mapping[str, Any] | None, config: ModelConfig) -> Self | None:
        """What configuration and file names of a directory say; None when its format is another.

        quantization: `quantization_config` of config.json. Raises CheckpointError naming file and field.
        """

    def expert_files(self, path: Path) -> list[Path]:
        """Files of experts that the index need not name."""
        return []

    def settled(self, path: Path, config: ModelConfig, text: Mapping[str, list[TensorInfo]]) -> Self:
        """The same with everything known that the tensors' headers tell. Raises CheckpointError."""
        return self

    @abstractmethod
    def expected(self, config: ModelConfig, layer: int) -> dict[str, Entry]:
        """The stored tensors of one layer's experts by canonical name."""

    def tensors(self, config: ModelConfig) -> dict[str, Entry]:
        """All stored tensors of the text network by canonical name."""
        expected = text_tensors(config)
        for layer in range(config.num_layers):
            expected |= self.expected(config, layer)
        return expected

    def place(self, path: Path, name: str) -> Path:
        """Where the tensor of this canonical name should be, for the error that it is missing."""
        return path

    @abstractmethod
    def read_layer(self, read: Read, config: ModelConfig, layer: int, where: str) -> DenseExperts | PackedExperts:
        """One layer's experts as they are stored, on the CPU. Raises CheckpointError naming `where` and the tensor."""

    # What the writer needs.

    def check(self, config: ModelConfig) -> None:
        """Raise UsageError with the numbers unless the groups divide the experts' dimensions."""
        if self.spec is not None:
            self.spec.check(config)

    def quantization_config(self) -> dict[str, Any]:
        """`quantization_config` for config.json, by which transformers and others find the method."""
        return {}

    def file_names(self, layers: int, shards: int) -> list[str]:
        """Names of one file a layer, and of the shards that hold everything else."""
        return shard_names(layers + shards)

    def layer_bytes(self, config: ModelConfig) -> int:
        """Bytes of one layer's experts as stored."""
        entries = self.expected(config, 0).values()
        return sum(DTYPES[dtypes[0]].itemsize * math.prod(shape) for dtypes, shape in entries)
