"""The file format `dg-w4a16-v1`: names, shapes and `w4_meta.json`. docs/format.md is its description.

A directory holds config.json, generation_config.json, tokenizer files, `w4_meta.json`, every non-expert tensor in
`model*.safetensors` and one `experts_NNN.safetensors` a layer. `manifest.json`, an index over all of the tensors and
`quantization_config` in config.json are Redraft's additions: other writers' directories lack them and are read all the
same.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from redraft.config import ModelConfig, QuantSpec, read_json
from redraft.errors import CheckpointError, UsageError
from redraft.network.weights import PackedExperts
from redraft.store.format import Entry, Format, Read, shard_names
from redraft.store.names import PACKED_NAMES, Shape, packed_layer, packed_name
from redraft.store.tensorfile import TensorInfo

FORMAT = "dg-w4a16-v1"
META = "w4_meta.json"
EXPERT_FILES = "experts_*.safetensors"
# A tensor of no elements under the name of unpacked experts, in a file that only the index names: transformers without
# Redraft would warn and leave the experts random, and stops at this size mismatch instead.
FENCE = "model.decoder.layers.0.experts.gate_up_proj"
FENCE_FILE = "needs_redraft.safetensors"


@dataclass(frozen=True)
class DgW4A16(Format):
    """Packed experts, six tensors a layer. `described`: what says so and with which group sizes, by file name."""

    name = FORMAT
    fence = (FENCE_FILE, FENCE)

    spec: QuantSpec | None
    described: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, compare=False)

    @classmethod
    def describe(cls, path: Path, quantization: Mapping[str, Any] | None, config: ModelConfig) -> Self | None:
        """w4_meta.json, config.json, or both say so: `save_pretrained` of transformers writes the latter only."""
        described: dict[str, Mapping[str, Any]] = {}
        if quantization is not None and quantization["quant_method"] == FORMAT:
            described["config.json"] = quantization
        if (path / META).exists() or (not described and any(path.glob(EXPERT_FILES))):
            described[META] = _read_meta(path)
        return cls(None, described) if described else None

    def expert_files(self, path: Path) -> list[Path]:
        return sorted(path.glob(EXPERT_FILES))

    def settled(self, path: Path, config: ModelConfig, text: Mapping[str, list[TensorInfo]]) -> Self:
        """Group sizes from the shapes of the first layer's scales; sizes that a description has must agree."""
        groups: dict[str, int] = {}
        dims = {"gu_s": ("group_gate_up", config.hidden_size), "dn_s": ("group_down", config.moe_intermediate_size)}
        for name, (key, dim) in dims.items():
            full = packed_name(0, name)
            if full not in text:
                raise CheckpointError(f"{self.place(path, full)}: tensor {full} is missing")
            shape = list(text[full][0].shape)
            if len(shape) != 3 or shape[-1] < 1 or dim % shape[-1]:
                raise CheckpointError(f"{path}: {name} of shape {shape} does not split {dim} weights into equal groups")
            groups[key] = dim // shape[-1]
            for file, says in self.described.items():
                if says.get(key, groups[key]) != groups[key]:
                    found = f"the shape of {name}, {shape}, means {groups[key]}"
                    raise CheckpointError(f"{path / file}: {key} is {says[key]!r}, but {found}")
        try:
            return dataclasses.replace(self, spec=QuantSpec(**groups))
        except UsageError as e:
            raise CheckpointError(f"{path}: {e}") from None

    def expected(self, config: ModelConfig, layer: int) -> dict[str, Entry]:
        assert self.spec is not None, "settled"
        shapes = packed_shapes(config, self.spec)
        return {packed_name(layer, name): ((dtype,), shape) for name, (dtype, shape) in shapes.items()}

    def place(self, path: Path, name: str) -> Path:
        """A file of the layer's own, unless transformers wrote the directory."""
        layer = packed_layer(name)
        return path if layer is None or not any(path.glob(EXPERT_FILES)) else path / expert_file(layer)

    def read_layer(self, read: Read, config: ModelConfig, layer: int, where: str) -> PackedExperts:
        return PackedExperts(*(read(packed_name(layer, name)) for name in PACKED_NAMES))

    def write_layer(self, packed: PackedExperts, layer: int) -> dict[str, torch.Tensor]:
        """Stored tensors by canonical name, on the CPU."""
        return {packed_name(layer, name): getattr(packed, name).cpu() for name in PACKED_NAMES}

    def quantization_config(self) -> dict[str, Any]:
        assert self.spec is not None, "settled"
        return {"quant_method": FORMAT, **dataclasses.asdict(self.spec)}

    def file_names(self, layers: int, shards: int) -> list[str]:
        """Even a single shard is called one of several, so that transformers reads the index, which lists experts."""
        return [*map(expert_file, range(layers)), *shard_names(shards)]


def expert_file(layer: int) -> str:
    """The file of one layer's packed experts."""
    return f"experts_{layer:03d}.safetensors"


def packed_shapes(config: ModelConfig, spec: QuantSpec) -> dict[str, tuple[str, Shape]]:
    """(safetensors dtype, shape) of one layer's packed tensors by name."""
    e, h, i = config.num_experts, config.hidden_size, config.moe_intermediate_size
    gate_up, down = (e, 2 * i, h // spec.group_gate_up), (e, h, i // spec.group_down)
    shapes = (("U8", (e, 2 * i, h // 2)), *[("F16", gate_up)] * 2, ("U8", (e, h, i // 2)), *[("F16", down)] * 2)
    return dict(zip(PACKED_NAMES, shapes, strict=True))


def packed_bytes(config: ModelConfig, spec: QuantSpec) -> int:
    """Bytes of one layer's packed experts."""
    return DgW4A16(spec).layer_bytes(config)


def _read_meta(path: Path) -> dict[str, Any]:
    """w4_meta.json of a directory. Raises CheckpointError when its format is not the one read here."""
    meta = read_json(path / META)
    found = meta.get("format")
    if found == FORMAT:
        return meta
    if isinstance(found, str) and re.fullmatch(r"dg-w4a16-v\d+", found):
        raise CheckpointError(f"{path / META}: format {found} is not the {FORMAT} this Redraft reads; upgrade Redraft")
    raise CheckpointError(f"{path / META}: format is {found!r}, expected {FORMAT!r}")
