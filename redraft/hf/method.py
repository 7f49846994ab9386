"""transformers' registry of quantisation methods, when more than one copy of Redraft is in a process.

A checkpoint may carry a copy of these modules (`redraft export --remote-code`), of another version than the one that
is installed. Each copy loads its own classes, and leaves the registry as it found it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.quantizers import auto

from redraft.store.dg_w4a16 import FORMAT


@contextmanager
def own_method(config: type | None = None, quantizer: type | None = None) -> Iterator[None]:
    """Within the block the method `dg-w4a16-v1` is that of these classes, or free; afterwards as before."""
    tables: tuple[dict[str, Any], ...] = (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING)
    before = [table.pop(FORMAT, None) for table in tables]
    try:
        _set(tables, [config, quantizer])
        yield
    finally:
        _set(tables, before)


def _set(tables: tuple[dict[str, Any], ...], classes: list[type | None]) -> None:
    for table, found in zip(tables, classes, strict=True):
        table.pop(FORMAT, None)
        if found is not None:
            table[FORMAT] = found
