"""manifest.json: what Redraft wrote into a directory, for finding damage. Other writers leave none."""

from pathlib import Path
from typing import Any

from redraft.config import read_json
from redraft.errors import CheckpointError
from redraft.store.tensorfile import TensorInfo, file_sha256, read_tensor, tensor_sha256

MANIFEST = "manifest.json"


def check_manifest(path: Path, infos: list[TensorInfo], packed: bool, verify: bool) -> None:
    """Compare the weights of a directory with its manifest, if there is one.

    Sizes, dtypes and shapes always where experts are packed, everything with `verify`. Raises CheckpointError naming
    file and tensor.
    """
    manifest_file = path / MANIFEST
    if not manifest_file.exists() or not (packed or verify):
        if verify:
            raise CheckpointError(f"{manifest_file}: file is missing, so there are no hashes to verify against")
        return
    manifest = read_json(manifest_file)
    try:
        _check_headers(path, manifest, infos)
        if verify:
            _check_hashes(path, manifest, infos)
    except (KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{manifest_file}: malformed ({type(e).__name__}: {e})") from None


def _check_headers(path: Path, manifest: dict[str, Any], infos: list[TensorInfo]) -> None:
    for name, entry in manifest["files"].items():
        # Only the weights: a tokenizer or generation_config.json edited by its owner is no reason to refuse.
        if not name.endswith(".safetensors"):
            continue
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size != entry["bytes"]:
            raise CheckpointError(f"{path / name}: has {size} bytes, {MANIFEST} recorded {entry['bytes']}")
    recorded = manifest["tensors"]
    for info in infos:
        entry = recorded.get(info.name)
        if entry is None or {key: entry[key] for key in info.recorded} != info.recorded:
            against = f"{info.recorded} against {entry}"
            raise CheckpointError(f"{info} differs from what {MANIFEST} recorded for it: {against}")
    absent = set(recorded) - {info.name for info in infos}
    if absent:
        raise CheckpointError(f"{path / recorded[min(absent)]['file']}: tensor {min(absent)} is missing")


def _check_hashes(path: Path, manifest: dict[str, Any], infos: list[TensorInfo]) -> None:
    for name, entry in manifest["files"].items():
        file = path / name
        if "sha256" in entry and (not file.is_file() or file_sha256(file) != entry["sha256"]):
            raise CheckpointError(f"{file}: changed, damaged or missing: its sha256 is not {MANIFEST}'s")
    for info in infos:
        digest = tensor_sha256(read_tensor(info))
        if digest != manifest["tensors"][info.name]["sha256"]:
            raise CheckpointError(f"{info} has another sha256 than {MANIFEST} recorded; the file is damaged")
