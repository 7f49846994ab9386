"""Where each slot of a runner stands, and what denoising leaves there: on the device, shared by all decoding rules.

A slot holds one request. A pass works on lanes, and a table int32 [W] says which slot each lane is; so a request keeps
its slot, and everything in it, whatever width the passes around it have.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    def allocate(cls, slots: int, device: torch.device | str) -> SlotState:
        """Empty slots: done, so that every kernel leaves them alone."""
        whole = torch.int32
        return cls(
            seed=torch.zeros(slots, dtype=torch.int64, device=device),
            canvas_index=torch.full((slots,), -1, dtype=whole, device=device),
            step=torch.zeros(slots, dtype=whole, device=device),
            done=torch.full((slots,), OUT_OF_STEPS, dtype=whole, device=device),
            temperature=torch.ones(slots, device=device),
        )

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
    def allocate(cls, slots: int, length: int, device: torch.device | str) -> Canvases:
        """Zeros; a rule starts the first canvas."""

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows = slots * length
        return cls(
            tokens=zeros(rows, dtype=torch.int64),
            argmax=zeros(rows, dtype=torch.int64),
            entropy=zeros(rows, dtype=torch.float32),
            accepted=zeros(rows, dtype=torch.int8),
            status=zeros(slots, 4, dtype=torch.int32),
        )
