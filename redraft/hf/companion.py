"""Files beside a module, in a checkpoint with its own code: transformers copies Python files alone."""

from __future__ import annotations

from pathlib import Path

from redraft.files import write_text


def bring(module_file: str, name: str, text: str) -> None:
    """Write the file `name` beside a module, unless it is there. Several processes may do so at once."""
    target = Path(module_file).with_name(name)
    if not target.exists() or target.read_text("utf-8") != text:
        write_text(target, text)
