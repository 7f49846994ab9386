"""What the kernels behind the head know about each slot of a batch: its decoding settings and where it stands.

All on the device, one entry a slot, so that a captured pass serves requests with any settings at any step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from redraft.config import DecodeSettings

CONVERGED, OUT_OF_STEPS = 1, 2  # bits of `done`


@dataclass
class SlotState:
    """Per-slot tensors [B]. `step` counts finished passes: the pass under way has number step + 1."""

    seed: torch.Tensor  # int64
    canvas_index: torch.Tensor  # int32
    step: torch.Tensor  # int32
    done: torch.Tensor  # int32, 0 while the canvas is being denoised, else the bits above
    temperature: torch.Tensor  # fp32, of the pass under way
    max_steps: torch.Tensor  # int32
    stability: torch.Tensor  # int32
    # fp64, because the reference subtracts them before it rounds to fp32.
    t_min: torch.Tensor
    t_max: torch.Tensor
    entropy_bound: torch.Tensor  # fp32
    confidence_threshold: torch.Tensor  # fp32

    @classmethod
    def allocate(cls, batch: int, device: torch.device | str) -> SlotState:
        """Empty slots: done, so that every kernel leaves them alone."""

        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(batch, dtype=dtype, device=device)

        whole, real = torch.int32, torch.float32
        return cls(
            seed=zeros(torch.int64),
            canvas_index=zeros(whole),
            step=zeros(whole),
            done=torch.full((batch,), OUT_OF_STEPS, dtype=whole, device=device),
            temperature=torch.ones(batch, dtype=real, device=device),
            max_steps=torch.ones(batch, dtype=whole, device=device),
            stability=zeros(whole),
            t_min=torch.ones(batch, dtype=torch.float64, device=device),
            t_max=torch.ones(batch, dtype=torch.float64, device=device),
            entropy_bound=zeros(real),
            confidence_threshold=zeros(real),
        )

    def configure(self, slot: int, settings: DecodeSettings, seed: int, canvas_index: int = 0) -> None:
        """Give a slot to a request. Takes effect with the slot's next reset (kernels/acceptance.py)."""
        self.seed[slot] = seed
        self.canvas_index[slot] = canvas_index
        self.max_steps[slot] = settings.max_denoising_steps
        self.stability[slot] = settings.stability_threshold
        self.t_min[slot], self.t_max[slot] = settings.t_min, settings.t_max
        self.entropy_bound[slot] = settings.entropy_bound
        self.confidence_threshold[slot] = settings.confidence_threshold


@dataclass
class Canvases:
    """What denoising leaves behind per position, [B * C], and per slot, [B]. A slot that is done keeps its rows."""

    tokens: torch.Tensor  # int64, the canvas that the next pass reads
    argmax: torch.Tensor  # int64, of the last pass: the canvas to commit once the slot is done
    entropy: torch.Tensor  # fp32, nats, of the last pass
    accepted: torch.Tensor  # int8, whether the token was drawn (1) or re-drawn uniformly (0)
    equal: torch.Tensor  # int32 [B], how many passes in a row left the argmax as it was
    status: torch.Tensor  # int32 [B, 4] for the host: done, step, accepted positions, canvas index

    @classmethod
    def allocate(cls, batch: int, length: int, device: torch.device | str) -> Canvases:
        """Zeros; kernels/acceptance.py starts a canvas."""

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows = batch * length
        return cls(
            tokens=zeros(rows, dtype=torch.int64),
            argmax=zeros(rows, dtype=torch.int64),
            entropy=zeros(rows, dtype=torch.float32),
            accepted=zeros(rows, dtype=torch.int8),
            equal=zeros(batch, dtype=torch.int32),
            status=zeros(batch, 4, dtype=torch.int32),
        )
