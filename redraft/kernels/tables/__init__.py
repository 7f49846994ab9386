"""Launch settings per GPU: what `redraft tune kernels` measured, or a rule for a GPU that nobody has measured.

A table is `<gpu name>.json` in this folder: {"gpu", "versions", "settings": {kernel: {field: value}}}. A kernel names
only the fields in which it differs from its default. Without a table the defaults, chosen on an H200, are fitted:

* `stages` or `num_stages` shrink with the shared memory of a multiprocessor, since every stage holds a tile there;
* `programs`, of kernels that stay on a multiprocessor, grows and shrinks with the number of multiprocessors;
* everything else stays: tiles and warps follow the shapes and the instruction set, which cards of a kind share.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from redraft.errors import RedraftError

Settings = TypeVar("Settings")

FOLDER = Path(__file__).parent
STAGE_FIELDS, PROGRAM_FIELDS = ("stages", "num_stages"), ("programs",)


@dataclass(frozen=True)
class Gpu:
    """What the fallback looks at. Shared memory in bytes, the most that one program may use."""

    name: str
    sms: int
    shared: int


H200 = Gpu("NVIDIA H200", sms=132, shared=232_448)  # where the defaults were measured


def current_gpu(device: torch.device | None = None) -> Gpu | None:
    """The GPU in use, None without one."""
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return None
    properties = torch.cuda.get_device_properties(device or torch.cuda.current_device())
    shared = getattr(properties, "shared_memory_per_block_optin", H200.shared)
    return Gpu(properties.name, properties.multi_processor_count, shared)


def settings_for(kernel: str, default: Settings, gpu: Gpu | None = None, *, fit: bool = True) -> Settings:
    """The settings of a kernel, a frozen dataclass like `default`, for `gpu` (None: the one in use).

    fit False: `default` was made for this GPU already, so that without a table it stays.
    Raises RedraftError naming the table when it holds a field that `default` does not have or a value of another type.
    """
    gpu = gpu or current_gpu()
    if gpu is None:
        return default
    table = load_table(gpu.name)
    if table is None:
        return fitted(default, gpu) if fit else default
    return replaced(default, table.get(kernel, {}), f"{table_path(gpu.name)}: {kernel}")


def fitted(default: Settings, gpu: Gpu) -> Settings:
    """`default` by the rule above."""
    changes = {}
    for field, value in dataclasses.asdict(default).items():  # type: ignore[call-overload]
        if field in STAGE_FIELDS:
            changes[field] = max(1, min(value, value * gpu.shared // H200.shared))
        elif field in PROGRAM_FIELDS:
            changes[field] = max(1, value * gpu.sms // H200.sms)
    return dataclasses.replace(default, **changes)  # type: ignore[type-var]


def replaced(default: Settings, changes: dict[str, Any], where: str) -> Settings:
    """`default` with `changes`, each checked against the field it replaces."""
    known = dataclasses.asdict(default)  # type: ignore[call-overload]
    for field, value in changes.items():
        if field not in known:
            raise RedraftError(f"{where}: unknown field {field!r}, expected one of {', '.join(known)}; tune again")
        kinds = (int,) if known[field] is not None else (int, type(None))
        if type(value) not in kinds or (value is not None and value < 1):
            raise RedraftError(f"{where}: {field} is {value!r}, expected a whole number of at least 1; tune again")
    return dataclasses.replace(default, **changes)  # type: ignore[type-var]


def table_path(gpu: str) -> Path:
    """Where the table of a GPU is kept: its name in lower case, runs of other characters as one dash."""
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


@lru_cache
def load_table(gpu: str) -> dict[str, dict[str, Any]] | None:
    """Settings by kernel, None when there is no table. Raises RedraftError when the file is damaged."""
    path = table_path(gpu)
    if not path.is_file():
        return None
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
        if not all(isinstance(entry, dict) for entry in settings.values()):
            raise TypeError("settings must hold an object per kernel")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise RedraftError(f"{path}: not a table of launch settings ({e}); delete it or tune again") from None
    return dict(settings)
