"""From a BF16 checkpoint to a packed one, in `dg-w4a16-v1` or in the per-expert files that other programs read."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from redraft.config import QuantSpec, read_json
from redraft.errors import CheckpointError, UsageError
from redraft.network.weights import DenseExperts, PackedExperts
from redraft.quant.report import QuantReport, TensorError, make_report, tensor_error
from redraft.quant.rtn import quantize_experts
from redraft.store.compressed_tensors import CompressedTensors
from redraft.store.dg_w4a16 import META, DgW4A16
from redraft.store.format import Format
from redraft.store.names import expert_names
from redraft.store.open import find_checkpoint, published_label
from redraft.store.read import Progress, open_checkpoint
from redraft.store.write import Facts, Made, plan, write_checkpoint
from redraft.version import __version__

REPORT = "quant_report.json"
GROUPS = (64, 32)  # of exports


def quantize(
    src: str | Path, dst: str | Path, spec: QuantSpec | None = None,
    *, overwrite: bool = False, progress: Progress | None = None, device: torch.device | str = "cpu",
) -> QuantReport:  # fmt: skip
    """Write the checkpoint `src` (directory, hub id or "demo") to the directory `dst` in `dg-w4a16-v1`.

    Only the routed experts are packed, in groups of `spec` (None: the published sizes), computed on `device`.
    `progress(done, total)` is called after every file. Whatever stops the work, Ctrl-C and exceptions of `progress`
    included, leaves nothing under `dst`; `workdir.partial_path(dst)` keeps the finished files and the same call goes
    on from there. A call with another source or spec starts afresh.

    Raises UsageError when `dst` cannot be the target or `spec` does not fit, CheckpointError for a source that cannot
    be read, a target that cannot be written and a disk that is too small.
    """
    spec = spec or QuantSpec()
    layout = DgW4A16(spec)

    def pack(dense: DenseExperts, layer: int, where: str) -> dict[str, torch.Tensor]:
        packed = quantize_experts(dense.gate_up, dense.down, spec, where=where, device=device)
        return layout.write_layer(packed, layer)

    def describe(report: QuantReport) -> dict[str, Any]:
        versions = {"method": "rtn", "redraft_version": __version__, "source": report.source}
        return {META: {"format": layout.name, **dataclasses.asdict(spec), **versions}, REPORT: report.to_dict()}

    return _write(src, dst, layout, pack, describe, device, overwrite=overwrite, progress=progress)


def export_compressed_tensors(
    src: str | Path, dst: str | Path, *, group: int = 64, symmetric: bool = False,
    overwrite: bool = False, progress: Progress | None = None, device: torch.device | str = "cpu",
) -> QuantReport:  # fmt: skip
    """Write the BF16 checkpoint `src` (directory, hub id or "demo") to the directory `dst` in `pack-quantized`.

    Every projection of every routed expert becomes a Linear of its own in groups of `group` (64 or 32); all else is
    kept as it is and named in the `ignore` list. Works layer by layer on `device`, resumes and replaces like
    `quantize`. Raises UsageError and CheckpointError.
    """
    if group not in GROUPS:
        raise UsageError(f"group size is {group}, expected {' or '.join(map(str, GROUPS))}")
    layout = CompressedTensors(group, symmetric)
    pack = partial(layout.write_layer, device=device)
    return _write(src, dst, layout, pack, lambda _: {}, device, overwrite=overwrite, progress=progress)


def _write(
    src: str | Path, dst: str | Path, layout: Format, pack: Callable[[DenseExperts, int, str], dict[str, torch.Tensor]],
    describe: Callable[[QuantReport], Mapping[str, Any]], device: torch.device | str, **options: Any,
) -> QuantReport:  # fmt: skip
    """Write a BF16 checkpoint in a packed format: `pack` makes a layer's tensors, `describe` files of the report.

    options: of `write_checkpoint`.
    """
    assert layout.spec is not None, "a packed format"
    spec = layout.spec
    source, device = open_checkpoint(find_checkpoint(src)), torch.device(device)
    if source.spec is not None:
        raise CheckpointError(f"{source.path}: is already packed ({source.format}); give the BF16 checkpoint")
    layout.check(source.config)
    label = published_label(src, source.path)
    method = layout.quantization_config()
    config = {**read_json(source.path / "config.json"), "quantization_config": method}

    def make_layer(layer: int) -> Made:
        dense = source.read_experts(layer)
        assert isinstance(dense, DenseExperts), "the source is not packed"
        tensors = pack(dense, layer, source.experts_place(layer))
        packed = layout.read_layer(tensors.__getitem__, source.config, layer, str(source.path))
        assert isinstance(packed, PackedExperts)
        stored = [tensor.to(device) for tensor in vars(packed).values()]
        gate_up, down = expert_names(layer)
        errors = [tensor_error(gate_up, dense.gate_up, *stored[:3]), tensor_error(down, dense.down, *stored[3:])]
        return tensors, {"errors": [dataclasses.asdict(error) for error in errors]}

    def report(facts: list[Facts]) -> QuantReport:
        errors = [TensorError(**error) for fact in facts for error in fact.get("errors", ())]
        return make_report(source, label, spec, errors, sum(part.bytes for part in parts))

    parts = plan(source, layout, make_layer)
    facts = write_checkpoint(
        source, Path(dst), parts, method, lambda facts: {"config.json": config, **describe(report(facts))}, **options
    )
    return report(facts)
