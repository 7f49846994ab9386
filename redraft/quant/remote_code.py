"""A packed checkpoint with the code that runs it, for transformers without Redraft.

transformers loads code from a checkpoint's directory as modules of one flat package and fetches those files that it
finds named in lines `from .NAME import`. So a module such as redraft.hf.experts becomes redraft_hf_experts.py: its
source as it is, with the lines that import from redraft rewritten. The entry module names all others. A file that a
module reads, which has its name but another suffix, becomes a string at the module's end.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from redraft.config import read_json
from redraft.errors import CheckpointError
from redraft.network.weights import PackedExperts
from redraft.store.dg_w4a16 import META, DgW4A16
from redraft.store.open import find_checkpoint
from redraft.store.read import Progress, open_checkpoint
from redraft.store.write import Made, plan, write_checkpoint
from redraft.version import __version__

ENTRY, ENTRY_NAME, CLASS = "redraft.hf.remote", "modeling_redraft", "RedraftDiffusionGemma"
COMPANION = "redraft.files"
AUTO_MAP = {"AutoModelForMultimodalLM": f"{ENTRY_NAME}.{CLASS}"}


@dataclass(frozen=True)
class RemoteCode:
    """What was written: the modules beside the weights, and the bytes of the weights."""

    modules: list[str]
    bytes: int


def export_remote_code(
    src: str | Path, dst: str | Path, *, overwrite: bool = False, progress: Progress | None = None
) -> RemoteCode:
    """Write the packed checkpoint `src` (directory or hub id) to the directory `dst` with the code to load it.

    Works file by file, resumes and replaces like `quantize`. Raises UsageError, and CheckpointError also for a source
    that is not packed.
    """
    source = open_checkpoint(find_checkpoint(src))
    if source.spec is None:
        raise CheckpointError(f"{source.path}: is not packed; run `redraft quantize {src} PACKED` and export PACKED")
    modules, layout = bundle(), DgW4A16(source.spec)

    def make_layer(layer: int) -> Made:
        packed = source.read_experts(layer)
        assert isinstance(packed, PackedExperts), "the source is packed"
        return layout.write_layer(packed, layer), {}

    parts = plan(source, layout, make_layer)
    method = {"quantization_config": layout.quantization_config(), "auto_map": AUTO_MAP}
    # The source's own description of how it was packed, if it has one.
    own = read_json(source.path / META) if (source.path / META).exists() else {}
    described = {
        "config.json": {**read_json(source.path / "config.json"), **method},
        META: {**own, "format": layout.name, **dataclasses.asdict(source.spec)},
        **modules,
    }
    identity = [layout.name, "remote code"]
    write_checkpoint(source, Path(dst), parts, identity, lambda _: described, overwrite=overwrite, progress=progress)
    return RemoteCode(sorted(modules), sum(part.bytes for part in parts))


def bundle() -> dict[str, str]:
    """File name -> source of the entry module and of every module of Redraft that it needs."""
    sources = {name: _source(name) for name in needed_modules(ENTRY)}
    files = {
        f"{flat_name(name)}.py": _header(name) + rewritten(text) + bringing(_companions(name))
        for name, text in sources.items()
    }
    others = sorted(flat_name(name) for name in sources if name != ENTRY)
    named = "".join(f"from .{name} import __name__ as _  # noqa: F401\n" for name in others)
    files[f"{ENTRY_NAME}.py"] += (
        "\n\n# transformers copies the files that it finds named in the entry module in this form.\n" + named
    )
    return files


def needed_modules(entry: str) -> list[str]:
    """`entry` and all modules of Redraft that it imports, directly or not, anywhere in their code; and COMPANION."""
    found = [entry, COMPANION]
    for module in found:
        for node in _own_imports(ast.parse(_source(module))):
            found += {target: None for target, _ in _targets(node) if target not in found}
    return found


def rewritten(text: str) -> str:
    """A module's source with its imports from Redraft made relative; those for type checkers alone are dropped.

    Every statement stays on its line.
    """
    lines = text.splitlines()
    tree = ast.parse(text)
    for node in [*_own_imports(tree), *_checks(tree)]:
        assert node.end_lineno is not None
        statement = _relative(node) if isinstance(node, ast.ImportFrom) else ""
        lines[node.lineno - 1 : node.end_lineno] = [
            " " * node.col_offset + statement,
            *[""] * (node.end_lineno - node.lineno),
        ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def bringing(companions: Mapping[str, str]) -> str:
    """What makes a module write the named files beside itself when it is imported."""
    calls = [f"bring(__file__, {name!r}, {text!r})\n" for name, text in companions.items()]
    return "".join([f"\nfrom .{flat_name(COMPANION)} import bring  # noqa: E402\n\n", *calls]) if calls else ""


def _companions(module: str) -> dict[str, str]:
    own = _file(module)
    others = (path for path in sorted(own.parent.glob(f"{own.stem}.*")) if path.suffix not in (".py", ".pyc", ".pyi"))
    return {path.name: path.read_text(encoding="utf-8") for path in others}


def _source(module: str) -> str:
    return _file(module).read_text(encoding="utf-8")


def _file(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} has a file"
    return Path(spec.origin)


def _header(module: str) -> str:
    return f"# {module} of Redraft {__version__} (Apache-2.0), written by `redraft export --remote-code`.\n"


def flat_name(module: str) -> str:
    """The module's name in the checkpoint's directory."""
    return ENTRY_NAME if module == ENTRY else module.replace(".", "_")


def _checks(tree: ast.AST) -> list[ast.If]:
    """The blocks under `if TYPE_CHECKING:`."""
    return [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]


def _own_imports(tree: ast.AST) -> Iterator[ast.ImportFrom]:
    """`from redraft... import ...`, the form in which this package imports itself, but for type checkers."""
    skipped = {id(node) for block in _checks(tree) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in skipped and f"{node.module}.".startswith("redraft."):
            yield node


def _targets(node: ast.ImportFrom) -> list[tuple[str, ast.alias]]:
    """Which module each imported name comes from: the module itself where the name is one."""
    assert node.module is not None
    targets = []
    for alias in node.names:
        inner = f"{node.module}.{alias.name}"
        targets.append((inner if _is_module(inner) else node.module, alias))
    return targets


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is a module, not a package
        return False


def _relative(node: ast.ImportFrom) -> str:
    statements: dict[str, list[str]] = {}
    for target, alias in _targets(node):
        bound = f" as {alias.asname}" if alias.asname else ""
        if target == node.module:
            statements.setdefault(f"from .{flat_name(target)}", []).append(alias.name + bound)
        else:
            statements.setdefault("from .", []).append(f"{flat_name(target)} as {alias.asname or alias.name}")
    return "; ".join(f"{source} import {', '.join(names)}" for source, names in statements.items())
