"""Launch settings: what `redraft tune kernels` measured per GPU, or a rule for a GPU that nobody has measured.

A table is `<gpu name>.json` in this folder: {"gpu", "versions", "settings": {kernel: {field: value}}}. A kernel names
only the fields in which it differs from its default. A default without an entry, chosen on an H200, is fitted:

* settings that need more shared memory than the GPU gives a program shrink: stages are halved, since every stage holds
  a tile there, then tiles;
* `programs`, of kernels that stay on a multiprocessor, grows and shrinks with the number of multiprocessors;
* everything else stays: tiles and warps follow the shapes and the instruction set, which cards of a kind share.

A launch that is refused all the same, for shared memory, registers or a tile that the compiler rejects, shrinks in the
same way, and the process remembers what was accepted (`run`).
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from redraft.errors import RedraftError
from redraft.kernels.launch import REFUSED

FOLDER = Path(__file__).parent
SMALLEST_TILE = 16  # a side; the least that the matrix units take


@dataclass(frozen=True)
class LaunchSettings:
    """Base of a kernel's settings, whole numbers or None. Fields with "stages" in their name count stages.

    tiles: fields that may be halved without another scratch or layout of the weights.
    """

    tiles: ClassVar[tuple[str, ...]] = ()

    def shared(self) -> int:
        """Bytes of shared memory that a program needs, at the largest shapes; 0: hardly any."""
        return 0


@dataclass(frozen=True)
class BlockSettings(LaunchSettings):
    """block_elements: elements a program takes of what a kernel copies or turns."""

    block_elements: int
    num_warps: int = 4


Settings = TypeVar("Settings", bound=LaunchSettings)


@dataclass(frozen=True)
class Gpu:
    """What the fallback looks at. Shared memory in bytes, the most that one program may use."""

    name: str
    sms: int
    shared: int


H200 = Gpu("NVIDIA H200", sms=132, shared=232_448)  # where the defaults were measured


def current_gpu(device: torch.device | None = None) -> Gpu | None:
    """The GPU in use, None without one."""
    # Asked at every launch, and whether CUDA has started is known at once.
    available = torch.cuda.is_initialized() or torch.cuda.is_available()
    if not available or (device is not None and device.type != "cuda"):
        return None
    return _gpu(device if device is not None and device.index is not None else torch.cuda.current_device())


@lru_cache
def _gpu(device: torch.device | int) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", H200.shared)
    return Gpu(properties.name, properties.multi_processor_count, shared)


def settings_for(kernel: str, default: Settings, gpu: Gpu | None = None, *, fit: bool = True) -> Settings:
    """The settings of a kernel, a frozen dataclass like `default`, for `gpu` (None: the one in use).

    fit False: `default` was made for this GPU already, so that without an entry it stays.
    Raises RedraftError naming the table when it holds a field that `default` does not have or a value of another type.
    """
    gpu = gpu or current_gpu()
    if gpu is None:
        return default
    changes = (load_table(gpu.name) or {}).get(kernel)
    if changes is None:
        return fitted(default, gpu) if fit else default
    return replaced(default, changes, f"{table_path(gpu.name)}: {kernel}")


@lru_cache
def fitted(default: Settings, gpu: Gpu) -> Settings:
    """`default` by the rule above."""
    if hasattr(default, "programs"):
        default = dataclasses.replace(default, programs=max(1, default.programs * gpu.sms // H200.sms))  # type: ignore
    less: Settings | None = default
    while less is not None and less.shared() > gpu.shared:
        default, less = less, smaller(less)
    return less or default


def smaller(settings: Settings) -> Settings | None:
    """The next smaller: all stages halved, once they are one the largest tile; None when nothing is left to halve."""
    values = dataclasses.asdict(settings)
    changes = {field: value // 2 for field, value in values.items() if "stages" in field and value > 1}
    if not changes:
        tiles = {field: values[field] for field in settings.tiles if values[field] > SMALLEST_TILE}
        if not tiles:
            return None
        largest = max(tiles, key=lambda field: tiles[field])
        changes = {largest: tiles[largest] // 2}
    return dataclasses.replace(settings, **changes)


_ACCEPTED: dict[tuple[str, LaunchSettings], Any] = {}  # in the place of settings that were refused
_as_given = False


@contextmanager
def as_given() -> Iterator[None]:
    """Have a refused launch raise, whatever was accepted before: who measures settings wants no others."""
    global _as_given
    _as_given = True
    try:
        yield
    finally:
        _as_given = False


def run(kernel: str, settings: Settings | None, default: Settings | None, launch: Callable[[Settings], object]) -> None:
    """launch(settings), or launch with smaller ones when they are refused, from then on always with those.

    settings None: those of the GPU in use for `default`. A refused launch has not begun, but one ahead of it in
    `launch` may have run. Raises what the smallest settings raise.
    """
    if settings is None:
        assert default is not None, "settings or a default"
        settings = settings_for(kernel, default)
    tried = settings if _as_given else _ACCEPTED.get((kernel, settings), settings)
    while True:
        try:
            launch(tried)
            break
        except REFUSED:
            less = None if _as_given else smaller(tried)
            if less is None:
                raise
            tried = less
    if tried is not settings:
        _ACCEPTED[kernel, settings] = tried


def replaced(default: Settings, changes: dict[str, Any], where: str) -> Settings:
    """`default` with `changes`, each checked against the field it replaces."""
    if not changes:
        return default
    known = dataclasses.asdict(default)
    for field, value in changes.items():
        if field not in known:
            raise RedraftError(f"{where}: unknown field {field!r}, expected one of {', '.join(known)}; tune again")
        kinds = (int,) if known[field] is not None else (int, type(None))
        if type(value) not in kinds or (value is not None and value < 1):
            raise RedraftError(f"{where}: {field} is {value!r}, expected a whole number of at least 1; tune again")
    return dataclasses.replace(default, **changes)


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
