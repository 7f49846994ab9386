"""A second model on the tensors of a first, so that two tiers run side by side for the memory of one."""

from __future__ import annotations

import copy
from typing import Any

from redraft.hf.experts import W4Experts


def twin(model: Any) -> Any:
    """A copy of transformers' model whose modules are its own and whose parameters and buffers are the same tensors.

    Packed experts are shared whole. What is then installed in one of the two leaves the other as it is.
    """
    shared: list[Any] = [*model.parameters(), *model.buffers()]
    shared += [module for module in model.modules() if isinstance(module, W4Experts)]
    return copy.deepcopy(model, {id(each): each for each in shared})
