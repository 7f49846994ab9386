"""A packed checkpoint with the code that runs it, for transformers without Redraft.

transformers loads code from a checkpoint's directory as modules of one flat package and fetches those files that it
finds named in lines `from .NAME import`. So a module such as redraft.hf.experts becomes redraft_hf_experts.py: its
source as it is, with the lines that import from redraft rewritten. The entry module names all others. A file that a
module reads, which has its name but another suffix, becomes a string at the module's end.
"""

import ast
import dataclasses
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
    head = f"of Redraft {__version__} (Apache-2.0), written by `redraft export --remote-code`.\n"
    needed = needed_modules(ENTRY)
    files = {}
    for name in needed:
        files[f"{flat_name(name)}.py"] = f"# {name} {head}" + rewritten(_source(name)) + bringing(_companions(name))
    named = [f"from .{name} import __name__ as _  # noqa: F401\n" for name in sorted(map(flat_name, needed[1:]))]
    note = "\n\n# transformers copies the files that it finds named in the entry module in this form.\n"
    files[f"{ENTRY_NAME}.py"] += note + "".join(named)
    return files


def needed_modules(entry: str) -> list[str]:
    """`entry` and all modules of Redraft that it imports, directly or not, anywhere in their code; and COMPANION."""
    found = [entry, COMPANION]
    for module in found:
        for node in _own_imports(ast.parse(_source(module))):
            found += {target: None for target, _, _ in _targets(node) if target not in found}
    return found


def flat_name(module: str) -> str:
    """The module's name in the checkpoint's directory."""
    return ENTRY_NAME if module == ENTRY else module.replace(".", "_")


def rewritten(text: str) -> str:
    """A module's source with its imports from Redraft made relative; those for type checkers alone are dropped.

    Every statement stays on its line.
    """
    lines = text.splitlines()
    for node in _own_imports(ast.parse(text)):
        imports: dict[str, list[str]] = {}
        for _, source, name in _targets(node):
            imports.setdefault(source, []).append(name)
        statement = "; ".join(f"{source} import {', '.join(names)}" for source, names in imports.items())
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        lines[first:last] = [" " * node.col_offset + statement, *[""] * (last - first - 1)]
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
    """The source of a module of Redraft, which need not exist."""
    place = Path(__file__).parents[2].joinpath(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def _own_imports(tree: ast.AST) -> Iterator[ast.ImportFrom | ast.If]:
    """`from redraft... import ...`, the form in which this package imports itself; blocks under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        own = isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("redraft.")
        if own or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node  # type: ignore[misc]
        else:
            yield from _own_imports(node)


def _targets(node: ast.ImportFrom | ast.If) -> Iterator[tuple[str, str, str]]:
    """By imported name the module it comes from, itself where it is one; and what takes the place of both.

    `from redraft.store import names` gives ("redraft.store.names", "from .", "redraft_store_names as names").
    """
    if isinstance(node, ast.If):
        return
    module = str(node.module)
    for alias in node.names:
        inner = f"{module}.{alias.name}"
        if _file(inner).exists():
            yield inner, "from .", f"{flat_name(inner)} as {alias.asname or alias.name}"
        else:
            yield module, f"from .{flat_name(module)}", ast.unparse(alias)
