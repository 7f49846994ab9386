"""DiffusionGemma's own decoding rule: accept by an entropy bound, re-draw the rest, stop when stable and confident.

Per pass: scale the logits by a temperature that falls linearly from t_max to t_min; draw one token per position; sort
positions by entropy H and accept position i while the entropies before it sum to at most the bound (Ben-Hamu et al.,
arXiv:2505.24857, an upper bound on the mutual information between the accepted tokens); re-draw every other position
uniformly. Acceptance is decided afresh in every pass. A canvas is done when its argmax equals that of the
`stability_threshold` passes before it and its mean entropy is below `confidence_threshold`; the argmax is committed.

The torch form, which the caller gives its random tokens, is the specification; kernels/acceptance.py is the same for a
captured pass, with counter-based ones.
"""

from __future__ import annotations

import torch

from redraft.config import DecodeSettings
from redraft.kernels.acceptance import EntropyBoundState, finish_pass, start_canvas
from redraft.kernels.sampling import Statistics
from redraft.kernels.state import CONVERGED, OUT_OF_STEPS, Canvases, SlotState


def temperature(own: EntropyBoundState, slots: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """fp32 [W] of the pass after `step` finished ones, int32 [W]; t_max before the first.

    Computed in fp32 as transformers does: rounding it otherwise would shift every logit.
    """
    most = own.max_steps[slots]
    span = (own.t_max[slots] - own.t_min[slots]).float()
    return own.t_min[slots].float() + span * ((most - step) / most)


def accept(entropy: torch.Tensor, bound: torch.Tensor | float) -> torch.Tensor:
    """bool [B, C] for entropies fp32 [B, C]: whose smaller ones sum to at most `bound` nats, a number or [B, 1]."""
    ordered, index = torch.sort(entropy, dim=-1)
    chosen = torch.cumsum(ordered, dim=-1) - ordered <= bound
    return torch.zeros_like(chosen).scatter(-1, index, chosen)


class EntropyBound:
    """The rule (decode/rule.py)."""

    name = "entropy-bound"
    Settings = DecodeSettings
    needs: frozenset[str] = frozenset()

    def allocate(self, slots: int, length: int, vocab: int, device: torch.device) -> EntropyBoundState:
        return EntropyBoundState.allocate(slots, length, vocab, device)

    def configure(self, own: EntropyBoundState, slot: int, settings: DecodeSettings) -> None:
        own.max_steps[slot] = min(settings.max_denoising_steps, 2**31 - 1)
        own.stability[slot] = min(settings.stability_threshold, 2**31 - 1)
        own.t_min[slot], own.t_max[slot] = settings.t_min, settings.t_max
        own.entropy_bound[slot] = settings.entropy_bound
        own.confidence_threshold[slot] = settings.confidence_threshold

    def start(
        self,
        slots: torch.Tensor,
        state: SlotState,
        own: EntropyBoundState,
        canvases: Canvases,
        tokens: torch.Tensor | None = None,
    ) -> None:
        if tokens is None:
            start_canvas(slots, state, own, canvases)
            return
        at, none = slots.long(), torch.zeros_like(slots)
        state.canvas_index[at] += 1
        state.step[at], state.done[at] = none, none
        state.temperature[at] = temperature(own, at, none)
        for target, value in ((canvases.tokens, tokens), (canvases.argmax, tokens)):
            target.view(-1, own.length)[at] = value
        canvases.accepted.view(-1, own.length)[at] = 0
        canvases.status[at] = torch.stack((none, none, none, state.canvas_index[at]), dim=-1)

    def step(
        self, stats: Statistics, slots: torch.Tensor, state: SlotState, own: EntropyBoundState, canvases: Canvases
    ) -> None:
        if stats.redraw is None:
            draw, argmax, entropy = (t.view(-1) for t in (stats.draw, stats.argmax, stats.entropy))
            finish_pass(draw, argmax, entropy, slots, state, own, canvases)
            return
        at = slots.long()
        running = state.done[at] == 0
        step, entropy = state.step[at] + 1, stats.entropy
        accepted = accept(entropy, own.entropy_bound[at, None])
        changed = (stats.argmax != canvases.argmax.view(-1, own.length)[at]).any(dim=-1)
        equal = torch.where(changed | (step == 1), 0, own.equal[at] + 1)
        sure = (equal >= own.stability[at]) & (entropy.mean(dim=-1) < own.confidence_threshold[at])
        done = CONVERGED * sure.int() + OUT_OF_STEPS * (step >= own.max_steps[at]).int()
        status = torch.stack((done, step, accepted.sum(dim=-1), state.canvas_index[at]), dim=-1).int()

        def put(target: torch.Tensor, value: torch.Tensor) -> None:
            keep = running.view(-1, *[1] * (value.ndim - 1))
            target[at] = torch.where(keep, value.to(target.dtype), target[at])

        rows = {"tokens": torch.where(accepted, stats.draw, stats.redraw), "argmax": stats.argmax, "entropy": entropy}
        for name, value in {**rows, "accepted": accepted}.items():
            put(getattr(canvases, name).view(-1, own.length), value)
        put(own.equal, equal)
        put(state.step, step)
        put(state.done, done)
        put(state.temperature, temperature(own, at, step))
        put(canvases.status, status)


ENTROPY_BOUND = EntropyBound()
