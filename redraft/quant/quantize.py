"""From a BF16 checkpoint to a packed one in `dg-w4a16-v1`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from redraft.config import QuantSpec, read_json
from redraft.errors import CheckpointError
from redraft.network.weights import iter_tensors
from redraft.quant.report import QuantReport, TensorError, kept_tensors, make_report, tensor_error
from redraft.quant.rtn import quantize_experts
from redraft.store import dg_w4a16
from redraft.store.names import expert_names, packed_name
from redraft.store.read import (
    CheckpointFiles,
    Progress,
    expert_place,
    find_checkpoint,
    open_checkpoint,
    published_label,
)
from redraft.store.write import Facts, Made, Part, copy_part, shard_name, shards, write_checkpoint
from redraft.version import __version__

REPORT = "quant_report.json"


def quantize(
    src: str | Path,
    dst: str | Path,
    spec: QuantSpec | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
) -> QuantReport:
    """Write the checkpoint `src` (directory, hub id or "demo") to the directory `dst` in `dg-w4a16-v1`.

    Only the routed experts are packed, in groups of `spec` (None: the published sizes), computed on `device`.
    `progress(done, total)` is called after every file. Whatever stops the work, Ctrl-C and exceptions of `progress`
    included, leaves nothing under `dst`; `workdir.partial_path(dst)` keeps the finished files and the same call goes
    on from there. A call with another source or spec starts afresh.

    Raises UsageError when `dst` cannot be the target or `spec` does not fit, CheckpointError for a source that cannot
    be read, a target that cannot be written and a disk that is too small.
    """
    source = open_checkpoint(find_checkpoint(src))
    if source.spec is not None:
        raise CheckpointError(f"{source.path}: is already packed ({source.format}); give the BF16 checkpoint")
    spec = spec or QuantSpec()
    spec.check(source.config)
    parts = _plan(source, spec, torch.device(device))
    label = published_label(src, source.path)

    def report(facts: list[Facts]) -> QuantReport:
        errors = [TensorError(**error) for fact in facts for error in fact.get("errors", ())]
        return make_report(source, label, spec, errors, sum(part.bytes for part in parts))

    facts = write_checkpoint(
        source,
        Path(dst),
        parts,
        [dg_w4a16.FORMAT, dataclasses.asdict(spec)],
        describe=lambda facts: _json_files(source, report(facts)),
        overwrite=overwrite,
        progress=progress,
    )
    return report(facts)


def _plan(source: CheckpointFiles, spec: QuantSpec, device: torch.device) -> list[Part]:
    """The experts of every layer, then everything else in shards.

    Even a single shard is called one of several, so that transformers reads the index, which lists the experts too.
    """
    layers = [_layer_part(source, spec, i, device) for i in range(source.config.num_layers)]
    kept = shards(kept_tensors(source))
    plain = [copy_part(source, shard_name(i, len(kept)), infos) for i, infos in enumerate(kept, 1)]
    return [*layers, *plain, fence_part()]


def fence_part() -> Part:
    """The file that stops a loader without Redraft."""
    return Part(dg_w4a16.FENCE_FILE, 0, lambda: ({dg_w4a16.FENCE: torch.empty(0, dtype=torch.uint8)}, {}))


def _layer_part(source: CheckpointFiles, spec: QuantSpec, layer: int, device: torch.device) -> Part:
    def make() -> Made:
        tensors, errors = _pack_layer(source, spec, layer, device)
        return tensors, {"errors": [dataclasses.asdict(error) for error in errors]}

    return Part(dg_w4a16.expert_file(layer), dg_w4a16.packed_bytes(source.config, spec), make)


def _pack_layer(
    source: CheckpointFiles, spec: QuantSpec, layer: int, device: torch.device
) -> tuple[dict[str, torch.Tensor], list[TensorError]]:
    names = expert_names(layer)
    gate_up, down = map(source.read, names)
    packed = quantize_experts(gate_up, down, spec, where=expert_place(source, layer), device=device)
    errors = [
        tensor_error(names[0], gate_up, packed.gu_q, packed.gu_s, packed.gu_z),
        tensor_error(names[1], down, packed.dn_q, packed.dn_s, packed.dn_z),
    ]
    return {packed_name(layer, key): tensor.cpu() for key, tensor in iter_tensors(packed)}, errors


def _json_files(source: CheckpointFiles, report: QuantReport) -> dict[str, Any]:
    """config.json, which tells transformers the method, and the two descriptions of what was done."""
    groups = dataclasses.asdict(report.spec)
    meta = {
        "format": dg_w4a16.FORMAT,
        **groups,
        "method": "rtn",
        "redraft_version": __version__,
        "source": report.source,
    }
    config = read_json(source.path / "config.json")
    return {
        "config.json": {**config, "quantization_config": dg_w4a16.quantization_config(report.spec)},
        dg_w4a16.META: meta,
        REPORT: report.to_dict(),
    }
