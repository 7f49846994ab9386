"""Where each slot of a runner stands, and what denoising leaves there: on the device, shared by all decoding rules.

A slot holds one request. A pass works on lanes, and a table int32 [W] says which slot each lane is; so a request keeps
its slot, and everything in it, whatever width the passes around it have.
"""

from dataclasses import dataclass
from typing import Self

import torch

CONVERGED, OUT_OF_STEPS = 1, 2  # bits of `done`


@dataclass
class SlotState:
    """Per-slot tensors [S]. `step` counts finished passes: the pass under way has number step + 1."""

    seed: torch.Tensor  # int64
    canvas_index: torch.Tensor  # int32, -1 before a request's first canvas
    step: torch.Tensor  # int32
    done: torch.Tensor  # int32, 0 while the canvas is being denoised, else the bits above
    temperature: torch.Tensor  # fp32, of the pass under way; the rule writes it

    @classmethod
    def allocate(cls, slots: int, device: torch.device | str) -> Self:
        """Empty slots: done, so that every kernel leaves them alone."""

        def full(value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((slots,), value, dtype=dtype, device=device)

        seed, temperature = full(0, torch.int64), full(1, torch.float32)
        return cls(seed, canvas_index=full(-1), step=full(0), done=full(OUT_OF_STEPS), temperature=temperature)

    def admit(self, slot: int, seed: int) -> None:
        """Give a slot to a request."""
        self.seed[slot], self.canvas_index[slot], self.done[slot] = seed, -1, OUT_OF_STEPS


@dataclass
class Canvases:
    """What denoising leaves behind per position, [S * C], and per slot. A slot that is done keeps its rows."""

    tokens: torch.Tensor  # int64, the canvas that the next pass reads
    argmax: torch.Tensor  # int64, of the last pass: the canvas to commit once the slot is done
    entropy: torch.Tensor  # fp32, nats, of the last pass
    accepted: torch.Tensor  # int8, whether the token was drawn (1) or re-drawn uniformly (0)
    status: torch.Tensor  # int32 [S, 4] for the host: done, step, accepted positions, canvas index

    @classmethod
    def allocate(cls, slots: int, length: int, device: torch.device | str) -> Self:
        """Zeros; a rule starts the first canvas."""
        dtypes = {"tokens": torch.int64, "argmax": torch.int64, "entropy": torch.float32, "accepted": torch.int8}
        rows = {name: torch.zeros(slots * length, dtype=dtype, device=device) for name, dtype in dtypes.items()}
        return cls(**rows, status=torch.zeros(slots, 4, dtype=torch.int32, device=device))
