"""From a BF16 checkpoint to a packed one: file by file, resumable, under the final name only when complete."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from redraft import __version__
from redraft.checkpoint import INDEX, CheckpointFiles, Progress, expert_place, find_checkpoint, open_checkpoint
from redraft.config import QuantSpec
from redraft.errors import CheckpointError, UsageError
from redraft.names import PARTS, expert_names, packed_name, part_of
from redraft.quant import dg_w4a16
from redraft.quant.report import REASONS, Kept, QuantReport, TensorError, tensor_error
from redraft.quant.rtn import quantize_experts
from redraft.quant.workdir import WorkDir, restore_replaced, write_json
from redraft.tensorfile import TensorInfo, file_sha256, read_header, tensor_sha256
from redraft.weights import iter_tensors

SHARD_BYTES = 2_000_000_000  # also what is held in memory while it is written; one layer of BF16 experts is 1.5 GB
REPORT = "quant_report.json"
SIDE_FILES = (
    "config.json", "generation_config.json", "*token*.json", "tokenizer.model", "vocab.*", "merges.txt", "*.jinja",
    "chat_template.json", "*processor_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip
_SPARE_BYTES = 1 << 20  # for headers and the JSON files written here


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
    target = Path(dst).expanduser().resolve()
    restore_replaced(target)
    _check_target(target, source.path.resolve(), overwrite)
    units = _plan(source, spec)
    with WorkDir(target) as work:
        work.resume(_fingerprint(source, spec), {unit.file for unit in units})
        work.need = sum(unit.bytes for unit in units if unit.file not in work.records) + _SPARE_BYTES
        work.need += sum(file.stat().st_size for file in _side_files(source))
        work.check_space()
        for count, unit in enumerate(units, 1):
            if unit.file not in work.records:
                _write_unit(work, source, spec, unit, torch.device(device))
                work.need -= unit.bytes
            if progress is not None:
                progress(count, len(units))
        report = _report(source, _label(src, source), spec, units, work)
        with work.writing():
            _write_side_files(source, report, work)
        work.publish()
    return report


def _check_target(target: Path, source: Path, overwrite: bool) -> None:
    if target == source or target in source.parents or source in target.parents:
        raise UsageError(f"{target}: lies within the source {source} or holds it; choose another directory")
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target}: is a file; choose a directory")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"{target}: exists and is not empty; choose another directory or ask to overwrite it")
    if not (target / "config.json").exists():
        raise UsageError(
            f"{target}: holds no checkpoint (no config.json), so it is not overwritten; choose another one"
        )


@dataclass(frozen=True)
class _Unit:
    """One file to write: a layer's packed experts, or kept tensors by canonical name. `bytes` counts the tensors."""

    file: str
    bytes: int
    layer: int | None = None
    names: tuple[str, ...] = ()


def _plan(source: CheckpointFiles, spec: QuantSpec) -> list[_Unit]:
    """The experts of every layer, then everything else in shards of at most SHARD_BYTES."""
    size = dg_w4a16.packed_bytes(source.config, spec)
    layers = [_Unit(dg_w4a16.expert_file(i), size, layer=i) for i in range(source.config.num_layers)]
    shards: list[dict[str, int]] = [{}]
    for name, info in _kept(source).items():
        if shards[-1] and sum(shards[-1].values()) + info.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = info.nbytes
    n = len(shards)
    files = [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)] if n > 1 else ["model.safetensors"]
    return layers + [
        _Unit(file, sum(shard.values()), names=tuple(shard)) for file, shard in zip(files, shards, strict=True)
    ]


def _kept(source: CheckpointFiles) -> dict[str, TensorInfo]:
    """Everything that is not quantised, by canonical name: a tied tensor once."""
    text = {name: places[0] for name, places in source.text.items() if part_of(name) != "experts"}
    return {**text, **source.extras}


def _fingerprint(source: CheckpointFiles, spec: QuantSpec) -> str:
    """Changes with the source's weight files, the group sizes and the version of the code that rounds."""
    files = {info.file for places in source.text.values() for info in places}
    files |= {info.file for info in source.extras.values()}
    stats = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    facts = [dg_w4a16.FORMAT, __version__, dataclasses.asdict(spec), stats]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _write_unit(work: WorkDir, source: CheckpointFiles, spec: QuantSpec, unit: _Unit, device: torch.device) -> None:
    errors: list[TensorError] = []
    path = work.path / unit.file
    if unit.layer is None:
        tensors = {name: source.read(name) for name in unit.names}
    else:
        tensors, errors = _pack_layer(source, spec, unit.layer, device)
    with work.writing():
        save_file(tensors, path, metadata={"format": "pt"})
    entries = {info.name: _entry(info, tensors[info.name]) for info in read_header(path)}
    work.record(unit.file, {"tensors": entries, "errors": [dataclasses.asdict(e) for e in errors]})


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


def _entry(info: TensorInfo, tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor's line in the manifest."""
    digest = tensor_sha256(tensor)
    return {"file": info.file.name, "dtype": info.dtype, "shape": list(info.shape), "sha256": digest}


def _report(source: CheckpointFiles, label: str, spec: QuantSpec, units: list[_Unit], work: WorkDir) -> QuantReport:
    kept: dict[str, list[int]] = {}
    for name, info in _kept(source).items():
        kept.setdefault(part_of(name), []).append(info.nbytes)
    experts = [places[0].nbytes for name, places in source.text.items() if part_of(name) == "experts"]
    return QuantReport(
        source=label,
        spec=spec,
        tensors=[TensorError(**e) for unit in units for e in work.records[unit.file]["errors"]],
        kept=[Kept(part, len(kept[part]), sum(kept[part]), REASONS[part]) for part in PARTS if part in kept],
        bytes_before=sum(experts) + sum(map(sum, kept.values())),
        bytes_after=sum(unit.bytes for unit in units),
    )


def _label(src: str | Path, source: CheckpointFiles) -> str:
    """What published files call the source: a hub id or the directory's name, never a path of this machine."""
    return source.path.resolve().name if Path(src).expanduser().is_dir() else str(src)


def _side_files(source: CheckpointFiles) -> set[Path]:
    return {file for pattern in SIDE_FILES for file in source.path.glob(pattern) if file.is_file()}


def _write_side_files(source: CheckpointFiles, report: QuantReport, work: WorkDir) -> None:
    """Everything beside the weights: copies, index, description, report, and last the manifest over all of it."""
    copied = {file.name for file in _side_files(source)}
    for name in copied:
        shutil.copyfile(source.path / name, work.path / name)
    records = sorted(work.records.items())  # a resumed run may have finished them in another order
    tensors = {name: entry for _, record in records for name, entry in record["tensors"].items()}
    written = {dg_w4a16.META: _meta(report), REPORT: report.to_dict()}
    if "model.safetensors" not in work.records:
        written[INDEX] = _index(tensors, report)
    for name, content in written.items():
        write_json(work.path / name, content)
    files: dict[str, dict[str, Any]] = {file: {"bytes": record["bytes"]} for file, record in records}
    for name in sorted(copied | written.keys()):
        path = work.path / name
        files[name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    write_json(work.path / dg_w4a16.MANIFEST, {"files": files, "tensors": tensors})


def _meta(report: QuantReport) -> dict[str, Any]:
    return {
        "format": dg_w4a16.FORMAT,
        **dataclasses.asdict(report.spec),
        "method": "rtn",
        "redraft_version": __version__,
        "source": report.source,
    }


def _index(tensors: dict[str, dict[str, Any]], report: QuantReport) -> dict[str, Any]:
    """transformers' index of the shards that hold everything but the experts."""
    weight_map = {name: entry["file"] for name, entry in tensors.items() if part_of(name) != "experts"}
    return {"metadata": {"total_size": sum(kept.bytes for kept in report.kept)}, "weight_map": weight_map}
