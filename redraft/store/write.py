"""A checkpoint made from another one, file by file: resumable, under its final name only when complete.

`quantize`, `export` and `merge-lora` all write through here.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from redraft.errors import UsageError
from redraft.files import write_text
from redraft.store.format import Format, shard_names
from redraft.store.manifest import MANIFEST
from redraft.store.read import INDEX, CheckpointFiles, Progress
from redraft.store.tensorfile import TensorInfo, file_sha256, read_header, tensor_sha256
from redraft.store.workdir import WorkDir, json_text, restore_replaced
from redraft.version import __version__

Facts = dict[str, Any]
Made = tuple[dict[str, torch.Tensor], Facts]
Change = Callable[[str, torch.Tensor], torch.Tensor]  # a tensor by canonical name -> what is written of it

SHARD_BYTES = 2_000_000_000  # also what is held in memory while it is written; one layer of BF16 experts is 1.5 GB
SINGLE = "model.safetensors"
SIDE_FILES = (
    "config.json", "generation_config.json", "*token*.json", "tokenizer.model", "vocab.*", "merges.txt", "*.jinja",
    "chat_template.json", "*processor_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip
_SPARE_BYTES = 1 << 20  # for headers and the JSON files written here


@dataclass(frozen=True)
class Part:
    """One weight file of the new checkpoint: its name, the bytes of its tensors, and how these are made.

    `make` returns tensors by canonical name, on the CPU, and JSON-ready facts for the report, which are kept beside
    the file when work is resumed.
    """

    file: str
    bytes: int
    make: Callable[[], Made]


def plan(source: CheckpointFiles, layout: Format, make_layer: Callable[[int], Made]) -> list[Part]:
    """The source with experts in another format: those of every layer as made, the rest in shards, and the fence."""
    config, kept = source.config, shards(source.kept)
    names, size = layout.file_names(config.num_layers, len(kept)), layout.layer_bytes(config)
    parts = [Part(names[layer], size, partial(make_layer, layer)) for layer in range(config.num_layers)]
    parts += [copy_part(source, *rest) for rest in zip(names[config.num_layers :], kept, strict=True)]
    if layout.fence is not None:
        file, name = layout.fence
        parts.append(Part(file, 0, lambda: ({name: torch.empty(0, dtype=torch.uint8)}, {})))
    return parts


def plan_changes(source: CheckpointFiles, change: Change) -> list[Part]:
    """Everything of the source by canonical name, in one file or in shards, as `change` makes it."""
    files = shards(source.tensors)
    names = [SINGLE] if len(files) == 1 else shard_names(len(files))
    return [copy_part(source, *file, change) for file in zip(names, files, strict=True)]


def shards(tensors: Mapping[str, TensorInfo]) -> list[dict[str, TensorInfo]]:
    """Split into what files of at most SHARD_BYTES hold, in the given order."""
    files: list[dict[str, TensorInfo]] = [{}]
    size = 0
    for name, info in tensors.items():
        if files[-1] and size + info.nbytes > SHARD_BYTES:
            files.append({})
            size = 0
        size += info.nbytes
        files[-1][name] = info
    return files


def copy_part(
    source: CheckpointFiles, file: str, infos: Mapping[str, TensorInfo], change: Change = lambda name, tensor: tensor
) -> Part:
    """A part that holds tensors of the source, by canonical name, as they are or as `change` makes them."""
    size = sum(info.nbytes for info in infos.values())
    return Part(file, size, lambda: ({name: change(name, source.read(name)) for name in infos}, {}))


def write_checkpoint(
    source: CheckpointFiles, target: Path, parts: Sequence[Part], identity: object,
    describe: Callable[[list[Facts]], Mapping[str, Any]] = lambda facts: {},
    *, overwrite: bool = False, progress: Progress | None = None,
) -> list[Facts]:  # fmt: skip
    """Write `parts` and the source's other files to the directory `target`; returns the facts of every part.

    A single part must be called SINGLE; several are listed in an index. describe: from the facts, further files by
    name, text or JSON-ready, which take the place of the source's. identity: anything JSON-ready that, with the
    source's weight files, decides the result; a call with the same one goes on where an earlier one was interrupted.
    Whatever stops the work, exceptions of `progress(done, total)` included, leaves nothing under `target` before all of
    it is complete.

    Raises UsageError when `target` cannot be the target, CheckpointError when it cannot be written or is too small.
    """
    target = target.expanduser().resolve()
    restore_replaced(target)
    _check_target(target, source.path.resolve(), overwrite)
    sizes = {part.file: part.bytes for part in parts}
    spare = _SPARE_BYTES + sum(file.stat().st_size for file in _side_files(source))
    with WorkDir(target, _fingerprint(source, identity), sizes, spare).resumed() as work:
        for count, part in enumerate(parts, 1):
            if part.file not in work.records:
                _write_part(work, part)
            if progress is not None:
                progress(count, len(parts))
        facts = [work.records[part.file]["facts"] for part in parts]
        described = dict(describe(facts))
        with work.writing():
            _write_side_files(work, source, described)
        work.publish()
    return facts


def _check_target(target: Path, source: Path, overwrite: bool) -> None:
    if Path.cwd().is_relative_to(target):  # an empty name, too
        raise UsageError(f"{target}: is or holds the current directory; name the one to be made")
    if target == source or target in source.parents or source in target.parents:
        raise UsageError(f"{target}: lies within the source {source} or holds it; choose another directory")
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target}: is a file; choose a directory")
    filled = target.is_dir() and any(target.iterdir())
    if filled and not overwrite:
        raise UsageError(f"{target}: exists and is not empty; choose another directory or ask to overwrite it")
    if filled and not (target / "config.json").exists():
        found = "holds no checkpoint (no config.json)"
        raise UsageError(f"{target}: {found}, so it is not overwritten; choose another one")


def _fingerprint(source: CheckpointFiles, identity: object) -> str:
    """Changes with the source's weight files, the identity and the version of the code."""
    files = {info.file for places in (*source.text.values(), source.extras.values()) for info in places}
    stats = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return hashlib.sha256(json.dumps([__version__, identity, stats]).encode()).hexdigest()


def _write_part(work: WorkDir, part: Part) -> None:
    tensors, facts = part.make()
    path = work.path / part.file
    with work.writing():
        save_file(tensors, path, metadata={"format": "pt"})
    infos = read_header(path)
    entries = {info.name: {**info.recorded, "sha256": tensor_sha256(tensors[info.name])} for info in infos}
    work.record(part.file, {"tensors": entries, "facts": facts})


def _side_files(source: CheckpointFiles) -> set[Path]:
    return {file for pattern in SIDE_FILES for file in source.path.glob(pattern) if file.is_file()}


def _write_side_files(work: WorkDir, source: CheckpointFiles, written: dict[str, Any]) -> None:
    """Everything beside the weights: copies, what is described, index, and last the manifest over all of it."""
    copied = {file.name for file in _side_files(source)} - written.keys()
    for name in copied:
        shutil.copyfile(source.path / name, work.path / name)
    records = sorted(work.records.items())  # a resumed run may have finished them in another order
    tensors = {name: entry for _, record in records for name, entry in record["tensors"].items()}
    if SINGLE not in work.records:
        total = sum(info.nbytes for file in work.records for info in read_header(work.path / file))
        weight_map = {name: entry["file"] for name, entry in tensors.items()}
        written[INDEX] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    for name, content in written.items():
        write_text(work.path / name, content if isinstance(content, str) else json_text(content))
    files: dict[str, Facts] = {file: {"bytes": record["bytes"]} for file, record in records}
    for name in sorted(copied | written.keys()):
        path = work.path / name
        files[name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    write_text(work.path / MANIFEST, json_text({"files": files, "tensors": tensors}))
