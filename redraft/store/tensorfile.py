"""Reading safetensors files: headers checked in full, tensors into memory of their own.

Read here and not by the library, whose torch reader maps a whole file copy-on-write: a machine with less memory than
the file refuses that (the real model has one file of 50 GB), and a file cut short while mapped ends the process. The
format is a header length (u64), a JSON header of {name: {dtype, shape, data_offsets}} and the bytes.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from redraft.errors import CheckpointError

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "U16": torch.uint16, "I16": torch.int16,
    "F16": torch.float16, "BF16": torch.bfloat16, "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip
_HEADER_LIMIT = 100_000_000  # bytes, safetensors' own
_CHUNK = 16 << 20


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as a file's header describes it. `dtype` is safetensors' spelling."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # of its bytes in the file

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPES[self.dtype].itemsize

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    @property
    def recorded(self) -> dict[str, Any]:
        """What a manifest records of it beside its hash."""
        return {"file": self.file.name, "dtype": self.dtype, "shape": list(self.shape)}

    def __str__(self) -> str:
        return f"{self.file}: tensor {self.name}"


def read_header(file: Path) -> list[TensorInfo]:
    """What a safetensors file holds, in the order of the bytes.

    Raises CheckpointError unless the header describes every byte of the file exactly once.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if not 2 <= length <= min(size - 8, _HEADER_LIMIT):
                raise ValueError(f"{length} bytes of header in a file of {size}")
            header = json.loads(f.read(length))
        infos = [_info(name, file, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{file}: damaged, its header cannot be read ({e})") from None
    infos.sort(key=lambda info: (info.start, info.end))
    _check_coverage(file, infos, 8 + length, size)
    return infos


def _info(name: str, file: Path, entry: dict[str, Any], data: int) -> TensorInfo:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"tensor {name} has dtype {dtype}, which Redraft does not know")
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"tensor {name} has shape {shape} and offsets {begin}, {end}")
    info = TensorInfo(name, file, dtype, tuple(shape), data + begin)
    if info.end != data + end:
        raise ValueError(f"tensor {name} of {info.nbytes} bytes has offsets {begin}, {end}")
    return info


def _check_coverage(file: Path, infos: list[TensorInfo], start: int, size: int) -> None:
    """Raise CheckpointError unless tensors fill the file from `start` to its end without holes or overlaps."""
    for info in infos:
        if info.start != start:
            raise CheckpointError(f"{info} starts at byte {info.start}, expected {start}; the file is damaged")
        if info.end > size:
            expected = infos[-1].end
            raise CheckpointError(f"{file}: cut short within tensor {info.name}: {size} bytes, expected {expected}")
        start = info.end
    if start != size:
        raise CheckpointError(f"{file}: has {size} bytes, its header describes {start}; the file is damaged")


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """One stored tensor in memory of its own, dtype as stored. Raises CheckpointError when it cannot be read."""
    data = torch.empty(info.nbytes, dtype=torch.uint8)
    rest = memoryview(data.numpy())  # type: ignore[arg-type]
    try:
        with info.file.open("rb", buffering=0) as f:
            f.seek(info.start)
            while rest:  # one read returns 2 GiB at most
                count = f.readinto(rest)
                if not count:
                    raise CheckpointError(f"{info} cannot be read: the file was cut short in the meantime")
                rest = rest[count:]
    except OSError as e:
        raise CheckpointError(f"{info} cannot be read ({e})") from None
    return data.view(DTYPES[info.dtype]).reshape(info.shape)


def holds_bytes_of(info: TensorInfo, tensor: torch.Tensor) -> bool:
    """Whether a stored tensor equals one in memory bit for bit, read in chunks so that it is never there twice."""
    expected = tensor_bytes(tensor).numpy()
    with info.file.open("rb") as f:
        f.seek(info.start)
        chunks = (expected[at : at + _CHUNK] for at in range(0, info.nbytes, _CHUNK))
        return all(np.array_equal(np.fromfile(f, np.uint8, len(chunk)), chunk) for chunk in chunks)


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The raw bytes of a contiguous CPU tensor, uint8 [nbytes], without a copy."""
    return tensor.reshape(-1).view(torch.uint8)


def tensor_sha256(tensor: torch.Tensor) -> str:
    """Hex digest over the tensor's raw bytes, as they lie in a safetensors file."""
    return hashlib.sha256(tensor_bytes(tensor).numpy().data).hexdigest()


def file_sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
