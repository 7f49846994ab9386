"""A checkpoint made from another one, file by file: resumable, under its final name only when complete."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from redraft import __version__
from redraft.checkpoint import INDEX, CheckpointFiles, Progress
from redraft.quant.dg_w4a16 import MANIFEST
from redraft.quant.quantize import SHARD_BYTES, _check_target, _entry, _side_files
from redraft.quant.workdir import WorkDir, restore_replaced, write_json
from redraft.tensorfile import TensorInfo, file_sha256, read_header

Facts = dict[str, Any]
Made = tuple[dict[str, torch.Tensor], Facts]

_SPARE_BYTES = 1 << 20  # for headers and the JSON files written here


@dataclass(frozen=True)
class Part:
    """One weight file of the new checkpoint: its size and how its tensors, by canonical name, are made.

    The second thing `make` returns are JSON-ready facts for the report, kept beside the file when work is resumed.
    """

    bytes: int
    make: Callable[[], Made]


def shards(tensors: Mapping[str, TensorInfo]) -> list[list[str]]:
    """Names in files of at most SHARD_BYTES, in their order."""
    files: list[list[str]] = [[]]
    size = 0
    for name, info in tensors.items():
        if files[-1] and size + info.nbytes > SHARD_BYTES:
            files.append([])
            size = 0
        size += info.nbytes
        files[-1].append(name)
    return files


def write_checkpoint(
    source: CheckpointFiles,
    target: Path,
    parts: Sequence[Part],
    identity: object,
    *,
    config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> list[Facts]:
    """Write `parts` and the source's other files to the directory `target`; returns the facts of every part.

    config: what to write as config.json instead of the source's. identity: anything JSON-ready that, with the source's
    weight files, decides the result; a call with the same one goes on where an earlier one was interrupted. Nothing
    appears under `target` before all of it is complete.

    Raises UsageError when `target` cannot be the target, CheckpointError when it cannot be written or is too small.
    """
    restore_replaced(target)
    _check_target(target, source.path.resolve(), overwrite)
    names = _file_names(len(parts))
    with WorkDir(target) as work:
        work.resume(_fingerprint(source, identity), set(names))
        todo = {name: part for name, part in zip(names, parts, strict=True) if name not in work.records}
        work.need = sum(part.bytes for part in todo.values()) + _SPARE_BYTES
        work.need += sum(file.stat().st_size for file in _side_files(source))
        work.check_space()
        for count, name in enumerate(names, 1):
            if name in todo:
                _write_part(work, name, todo[name])
                work.need -= todo[name].bytes
            if progress is not None:
                progress(count, len(names))
        facts = [work.records[name]["facts"] for name in names]
        with work.writing():
            _write_side_files(work, source, config)
        work.publish()
    return facts


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _fingerprint(source: CheckpointFiles, identity: object) -> str:
    infos = [info for places in source.text.values() for info in places] + list(source.extras.values())
    stats = sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in {info.file for info in infos})
    return hashlib.sha256(json.dumps([__version__, identity, stats]).encode()).hexdigest()


def _write_part(work: WorkDir, name: str, part: Part) -> None:
    tensors, facts = part.make()
    path = work.path / name
    with work.writing():
        save_file(tensors, path, metadata={"format": "pt"})
    entries = {info.name: _entry(info, tensors[info.name]) for info in read_header(path)}
    work.record(name, {"tensors": entries, "facts": facts})


def _write_side_files(work: WorkDir, source: CheckpointFiles, config: Mapping[str, Any] | None) -> None:
    """Copies, config.json, index, and last the manifest over all of it."""
    others = {file.name for file in _side_files(source)}
    for name in others:
        shutil.copyfile(source.path / name, work.path / name)
    if config is not None:
        write_json(work.path / "config.json", config)
    records = sorted(work.records.items())
    tensors = {name: entry for _, record in records for name, entry in record["tensors"].items()}
    if "model.safetensors" not in work.records:
        total = sum(info.nbytes for file, _ in records for info in read_header(work.path / file))
        weight_map = {name: entry["file"] for name, entry in tensors.items()}
        write_json(work.path / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        others.add(INDEX)
    files: dict[str, Facts] = {file: {"bytes": record["bytes"]} for file, record in records}
    for name in sorted(others):
        path = work.path / name
        files[name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    write_json(work.path / MANIFEST, {"files": files, "tensors": tensors})
