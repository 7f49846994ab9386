"""Files that appear whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A text file that takes the place of `path` when the block ends well; else nothing changes and nothing is left."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    try:
        with fresh.open("x", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write or replace a small file."""
    with replacing(path) as file:
        file.write(text)


def bring(module_file: str, name: str, text: str) -> None:
    """Write the file `name` beside a module of a checkpoint with its own code: transformers copies Python files alone.

    One that is there already stays as it is. Several processes may do so at once.
    """
    target = Path(module_file).with_name(name)
    if not target.exists() or target.read_text("utf-8") != text:
        write_text(target, text)
