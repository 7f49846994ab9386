"""What a decoding rule is: the part of a pass between the statistics of the logits and the next canvas.

A rule owns its settings and its tensors, one entry a slot, and moves canvases in place without asking the host, so that
it can be captured in a CUDA graph. `slots` int32 [W] says which slot each lane of a pass is. A new rule is one file in
this folder, its import and its name in RULES.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from redraft.config import DecodeSettings
from redraft.errors import UsageError
from redraft.kernels.sampling import Statistics
from redraft.kernels.state import Canvases, SlotState


class Rule(Protocol):
    """A decoding rule. `own` is what `allocate` returned; statistics are [W, C]."""

    name: str
    Settings: type[DecodeSettings]  # frozen and validated
    needs: frozenset[str]  # statistics beyond draw, argmax and entropy

    def allocate(self, slots: int, length: int, vocab: int, device: torch.device) -> Any:
        """The rule's own tensors, [S]."""
        ...

    def configure(self, own: Any, slot: int, settings: Any) -> None:
        """Give a slot the settings of its request."""
        ...

    def start(
        self, slots: torch.Tensor, state: SlotState, own: Any, canvases: Canvases, tokens: torch.Tensor | None = None
    ) -> None:
        """Begin the next canvas of these slots: uniform tokens int64 [W, C], or counter-based ones where None."""
        ...

    def step(self, stats: Statistics, slots: torch.Tensor, state: SlotState, own: Any, canvases: Canvases) -> None:
        """Count a pass of these slots, unless they are done: next tokens, temperature, done bits and status."""
        ...


def _entropy_bound() -> Rule:
    from redraft.decode.entropy_bound import ENTROPY_BOUND

    return ENTROPY_BOUND


# Rules by name, imported when they are first asked for.
RULES: dict[str, Callable[[], Rule]] = {"entropy-bound": _entropy_bound}
DEFAULT_RULE = "entropy-bound"


def find_rule(name: str) -> Rule:
    """The rule of that name. Raises UsageError with the names there are."""
    if not isinstance(name, str) or name not in RULES:
        raise UsageError(f"rule is {name!r}, expected one of {', '.join(RULES)}")
    return RULES[name]()
