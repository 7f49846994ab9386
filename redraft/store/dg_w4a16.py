"""The file format `dg-w4a16-v1`: names, shapes and `w4_meta.json`. docs/format.md is its description.

A directory holds config.json, generation_config.json, tokenizer files, `w4_meta.json`, every non-expert tensor in
`model*.safetensors` and one `experts_NNN.safetensors` a layer. `manifest.json`, an index over all of the tensors and
`quantization_config` in config.json are Redraft's additions: other writers' directories lack them and are read all the
same.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from redraft.config import ModelConfig, QuantSpec, read_json
from redraft.errors import CheckpointError, UsageError

FORMAT = "dg-w4a16-v1"
META = "w4_meta.json"
MANIFEST = "manifest.json"
EXPERT_FILES = "experts_*.safetensors"
# A tensor of no elements under the name of unpacked experts, in a file that only the index names: transformers without
# Redraft would warn and leave the experts random, and stops at this size mismatch instead.
FENCE = "model.decoder.layers.0.experts.gate_up_proj"
FENCE_FILE = "needs_redraft.safetensors"
PACKED_NAMES = ("gu_q", "gu_s", "gu_z", "dn_q", "dn_s", "dn_z")

Shape = tuple[int, ...]


def expert_file(layer: int) -> str:
    """The file of one layer's packed experts."""
    return f"experts_{layer:03d}.safetensors"


def packed_shapes(config: ModelConfig, spec: QuantSpec) -> dict[str, tuple[str, Shape]]:
    """(safetensors dtype, shape) of one layer's packed tensors by name."""
    e, h, i = config.num_experts, config.hidden_size, config.moe_intermediate_size
    gate_up, down = (e, 2 * i, h // spec.group_gate_up), (e, h, i // spec.group_down)
    return {
        "gu_q": ("U8", (e, 2 * i, h // 2)),
        "gu_s": ("F16", gate_up),
        "gu_z": ("F16", gate_up),
        "dn_q": ("U8", (e, h, i // 2)),
        "dn_s": ("F16", down),
        "dn_z": ("F16", down),
    }


def quantization_config(spec: QuantSpec) -> dict[str, Any]:
    """`quantization_config` for config.json, by which transformers finds the method."""
    return {"quant_method": FORMAT, **dataclasses.asdict(spec)}


def packed_bytes(config: ModelConfig, spec: QuantSpec) -> int:
    """Bytes of one layer's packed experts."""
    return sum(torch.Size(shape).numel() * (1 if d == "U8" else 2) for d, shape in packed_shapes(config, spec).values())


def read_meta(path: Path) -> dict[str, Any]:
    """w4_meta.json of a directory. Raises CheckpointError when its format is not the one read here."""
    meta = read_json(path / META)
    found = meta.get("format")
    if found == FORMAT:
        return meta
    if isinstance(found, str) and re.fullmatch(r"dg-w4a16-v\d+", found):
        raise CheckpointError(f"{path / META}: format {found} is not the {FORMAT} this Redraft reads; upgrade Redraft")
    raise CheckpointError(f"{path / META}: format is {found!r}, expected {FORMAT!r}")


def infer_spec(
    path: Path, described: Mapping[str, Mapping[str, Any]], config: ModelConfig, gu_s: Shape, dn_s: Shape
) -> QuantSpec:
    """Group sizes from the shapes of one layer's scales; sizes that a description, by file name, has must agree."""
    groups: dict[str, int] = {}
    for key, name, shape, dim in (
        ("group_gate_up", "gu_s", gu_s, config.hidden_size),
        ("group_down", "dn_s", dn_s, config.moe_intermediate_size),
    ):
        if len(shape) != 3 or shape[-1] < 1 or dim % shape[-1]:
            raise CheckpointError(
                f"{path}: {name} of shape {list(shape)} does not split {dim} weights into equal groups"
            )
        groups[key] = dim // shape[-1]
        for file, says in described.items():
            if says.get(key, groups[key]) != groups[key]:
                raise CheckpointError(
                    f"{path / file}: {key} is {says[key]!r}, but the shape of {name}, {list(shape)}, means "
                    f"{groups[key]}"
                )
    try:
        return QuantSpec(**groups)
    except UsageError as e:
        raise CheckpointError(f"{path}: {e}") from None
