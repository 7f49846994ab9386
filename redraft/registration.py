"""What makes `import redraft` enough for transformers to load packed checkpoints, without loading transformers.

The quantisation method is registered when `redraft.hf` is imported. That happens right after transformers' own module
of DiffusionGemma, whoever imports it: a checkpoint cannot be loaded before.
"""

import importlib
import sys
import warnings
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MODULE = "transformers.models.diffusion_gemma.modeling_diffusion_gemma"


class _Watcher(MetaPathFinder):
    """Finds MODULE as Python does, and imports `redraft.hf` once it has run."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == MODULE else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register() -> None:
    try:
        importlib.import_module("redraft.hf")
    except Exception as e:  # of any kind in another transformers; whoever wants its model alone still gets it
        why = f"Redraft does not fit this transformers ({e})"
        warnings.warn(f"packed checkpoints cannot be loaded: {why}", stacklevel=2)


def watch() -> None:
    """Register the method now if transformers' model is loaded, else as soon as it is."""
    if MODULE in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Watcher())
