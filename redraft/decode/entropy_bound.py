"""DiffusionGemma's own decoding rule: accept by an entropy bound, re-draw the rest, stop when stable and confident.

Per pass: scale the logits by a temperature that falls linearly from t_max to t_min; draw one token per position; sort
positions by entropy H and accept position i while the entropies before it sum to at most the bound (Ben-Hamu et al.,
arXiv:2505.24857, an upper bound on the mutual information between the accepted tokens); re-draw every other position
uniformly. Acceptance is decided afresh in every pass. A canvas is done when its argmax equals that of the
`stability_threshold` passes before it and its mean entropy is below `confidence_threshold`; the argmax is committed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from redraft.config import DecodeSettings
from redraft.decode.streams import Stream


def temperature(settings: DecodeSettings, step: int) -> torch.Tensor:
    """fp32 scalar for pass `step` = 1..max_denoising_steps; t_max belongs to a step before the first.

    Computed in fp32 as transformers does: rounding it otherwise would shift every logit.
    """
    remaining = torch.tensor(settings.max_denoising_steps - step + 1, dtype=torch.int32)
    return settings.t_min + (settings.t_max - settings.t_min) * (remaining / settings.max_denoising_steps)


def accept(entropy: torch.Tensor, bound: float) -> torch.Tensor:
    """bool [B, C] for entropies fp32 [B, C]: positions whose smaller entropies sum to at most `bound` nats."""
    ordered, index = torch.sort(entropy, dim=-1)
    chosen = torch.cumsum(ordered, dim=-1) - ordered <= bound
    return torch.zeros_like(chosen).scatter(-1, index, chosen)


class StopTest:
    """Stable and confident: the last `stability_threshold` argmax canvases equal this one, and mean entropy is low."""

    def __init__(self, settings: DecodeSettings):
        self._threshold = settings.confidence_threshold
        self._stability = settings.stability_threshold
        self._history: list[torch.Tensor] = []

    def __call__(self, argmax: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        """bool [B] from this pass's argmax int64 [B, C] and entropy fp32 [B, C]; remembers the argmax."""
        stable = torch.full(argmax.shape[:1], len(self._history) == self._stability, device=argmax.device)
        for earlier in self._history:
            stable &= (earlier == argmax).all(dim=-1)
        self._history = [*self._history, argmax][-self._stability :] if self._stability else []
        return stable & (entropy.mean(dim=-1) < self._threshold)


@dataclass
class Pass:
    """What one denoising pass left behind, per row of the batch."""

    argmax: torch.Tensor  # int64 [B, C]; of a row that is done, the canvas it stopped with
    accepted: torch.Tensor  # bool [B, C]
    entropy: torch.Tensor  # fp32 [B, C]
    done: torch.Tensor  # bool [B]


class EntropyBoundDecoder:
    """One canvas of a batch. Use: canvas and self_conditioning into a denoise pass, its logits into `step`, repeat.

    Rows that are done keep their canvas, argmax and self-conditioning; the others go on.
    """

    def __init__(self, settings: DecodeSettings, stream: Stream, canvas_index: int):
        self._settings, self._stream, self._index = settings, stream, canvas_index
        self._stop = StopTest(settings)
        self.steps = 0
        self.canvas = stream.tokens(canvas_index, 0)
        self.argmax = self.canvas
        self.self_conditioning: torch.Tensor | None = None
        self._entropy: torch.Tensor | None = None
        self.done = torch.zeros(self.canvas.shape[0], dtype=torch.bool, device=self.canvas.device)

    def finished(self) -> bool:
        """Whether every row is done or the steps are used up."""
        return self.steps == self._settings.max_denoising_steps or bool(self.done.all())

    def step(self, logits: torch.Tensor) -> Pass:
        """Take a pass's soft-capped logits fp32 [B, C, V] and move every row that is not done."""
        self.steps += 1
        scaled = logits / temperature(self._settings, self.steps).to(logits.device)
        stats = self._stream.statistics(scaled, self._index, self.steps)
        accepted = accept(stats.entropy, self._settings.entropy_bound)
        redraw = self._stream.tokens(self._index, self.steps)
        self._move(torch.where(accepted, stats.draw, redraw), stats.argmax, scaled, stats.entropy)
        assert self._entropy is not None
        self.done = self.done | self._stop(self.argmax, self._entropy)
        return Pass(self.argmax, accepted, self._entropy, self.done)

    def _move(self, canvas: torch.Tensor, argmax: torch.Tensor, scaled: torch.Tensor, entropy: torch.Tensor) -> None:
        if self.self_conditioning is None or self._entropy is None:
            self.canvas, self.argmax, self.self_conditioning, self._entropy = canvas, argmax, scaled, entropy
            return
        keep = self.done[:, None]
        self.canvas = torch.where(keep, self.canvas, canvas)
        self.argmax = torch.where(keep, self.argmax, argmax)
        self._entropy = torch.where(keep, self._entropy, entropy)
        self.self_conditioning = torch.where(keep[..., None], self.self_conditioning, scaled)
