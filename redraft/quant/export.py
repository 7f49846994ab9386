"""From a BF16 checkpoint to compressed-tensors `pack-quantized`: per-expert files that other programs read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from redraft.config import read_json
from redraft.errors import CheckpointError, UsageError
from redraft.quant.report import QuantReport, TensorError, kept_tensors, make_report, tensor_error
from redraft.store.compressed_tensors import (
    FORMAT,
    PROJECTIONS,
    Scheme,
    check_fit,
    layer_bytes,
    pack,
    quantization_config,
    read_experts,
    tensor_name,
)
from redraft.store.names import expert_names
from redraft.store.read import (
    CheckpointFiles,
    Progress,
    expert_place,
    find_checkpoint,
    open_checkpoint,
    published_label,
)
from redraft.store.write import Made, Part, copy_part, shard_name, shards, write_checkpoint

GROUPS = (64, 32)


def export_compressed_tensors(
    src: str | Path,
    dst: str | Path,
    *,
    group: int = 64,
    symmetric: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
) -> QuantReport:
    """Write the BF16 checkpoint `src` (directory, hub id or "demo") to the directory `dst` in `pack-quantized`.

    Every projection of every routed expert becomes a Linear of its own in groups of `group` (64 or 32); all else is
    kept as it is and named in the `ignore` list. Works layer by layer on `device`, resumes and replaces like
    `quantize`. Raises UsageError and CheckpointError.
    """
    if group not in GROUPS:
        raise UsageError(f"group size is {group}, expected {' or '.join(map(str, GROUPS))}")
    source = open_checkpoint(find_checkpoint(src))
    if source.spec is not None:
        raise CheckpointError(f"{source.path}: is already packed ({source.format}); give the BF16 checkpoint")
    scheme = Scheme(group, symmetric)
    check_fit(source.config, scheme, str(source.path))
    layers, kept = source.config.num_layers, shards(kept_tensors(source))
    names = [shard_name(i, layers + len(kept)) for i in range(1, layers + len(kept) + 1)]
    parts = [_layer_part(source, names[layer], layer, scheme, torch.device(device)) for layer in range(layers)]
    parts += [copy_part(source, name, infos) for name, infos in zip(names[layers:], kept, strict=True)]
    config = {**read_json(source.path / "config.json"), "quantization_config": quantization_config(scheme)}
    facts = write_checkpoint(
        source,
        Path(dst),
        parts,
        [FORMAT, dataclasses.asdict(scheme)],
        describe=lambda _: {"config.json": config},
        overwrite=overwrite,
        progress=progress,
    )
    errors = [TensorError(**error) for fact in facts for error in fact.get("errors", ())]
    return make_report(
        source, published_label(src, source.path), scheme.spec, errors, sum(part.bytes for part in parts)
    )


def _layer_part(source: CheckpointFiles, file: str, layer: int, scheme: Scheme, device: torch.device) -> Part:
    def make() -> Made:
        gate_up, down = map(source.read, expert_names(layer))
        tensors = _pack_layer(gate_up, down, layer, scheme, expert_place(source, layer), device)
        packed = read_experts(tensors.__getitem__, source.config, layer, scheme.symmetric, str(source.path))
        quantised = ((packed.gu_q, packed.gu_s, packed.gu_z), (packed.dn_q, packed.dn_s, packed.dn_z))
        errors = [
            tensor_error(name, weight, *parts)
            for name, weight, parts in zip(expert_names(layer), (gate_up, down), quantised, strict=True)
        ]
        return tensors, {"errors": [dataclasses.asdict(error) for error in errors]}

    return Part(file, layer_bytes(source.config, scheme), make)


def _pack_layer(
    gate_up: torch.Tensor, down: torch.Tensor, layer: int, scheme: Scheme, where: str, device: torch.device
) -> dict[str, torch.Tensor]:
    """gate_up [E, 2I, H] and down [E, H, I] -> stored tensors by canonical name, on the CPU."""
    tensors: dict[str, torch.Tensor] = {}
    for expert in range(down.shape[0]):
        matrices = (*gate_up[expert].chunk(2), down[expert])
        for projection, matrix in zip(PROJECTIONS, matrices, strict=True):
            packed = pack(matrix.to(device), scheme, f"{where}[{expert}].{projection}")
            tensors |= {tensor_name(layer, expert, projection, key): t.cpu() for key, t in packed.items()}
    return tensors
