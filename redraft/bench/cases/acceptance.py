"""kernels/acceptance.py: the end of a pass, from its statistics to the next canvas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from redraft.bench.cases.inputs import SETTINGS, first_pass
from redraft.bench.kernels import KernelCase, Problem, Scale
from redraft.bench.roofline import Work
from redraft.decode.entropy_bound import accept
from redraft.kernels.acceptance import finish_pass
from redraft.kernels.sampling import random_tokens
from redraft.kernels.state import Canvases


def build(scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    config, batch, length, vocab = scale.config, scale.batch, scale.config.canvas_length, scale.config.vocab_size
    slots, canvases = first_pass(scale), Canvases.allocate(batch, length, scale.device)
    draw, argmax = (torch.randint(vocab, (scale.rows,), generator=generator, device=scale.device) for _ in range(2))
    slots.max_steps.fill_(10**9)  # timing repeats the pass: it must not be the last, after which nothing is done
    # Multiples of 2^-12 have exact sums, in whatever order and precision.
    entropy = torch.randint(64, (scale.rows,), generator=generator, device=scale.device).float() * 2.0**-12
    outputs = {"tokens": canvases.tokens, "argmax": canvases.argmax, "entropy": canvases.entropy}

    def following() -> torch.Tensor:
        accepted = accept(entropy.view(batch, length), SETTINGS.entropy_bound)
        redraw = random_tokens(slots.seed, length, vocab, canvas=0, step=1)
        return torch.where(accepted, draw.view(batch, length), redraw).flatten()

    def reset() -> None:
        slots.step.zero_()
        slots.done.zero_()
        canvases.equal.zero_()

    return Problem(
        run=lambda: finish_pass(draw, argmax, entropy, slots, canvases, length, config.vocab_size),
        outputs=outputs,
        reference=lambda: {"tokens": following(), "argmax": argmax, "entropy": entropy},
        work=Work(draw.nbytes + argmax.nbytes + entropy.nbytes + sum(t.nbytes for t in outputs.values()), 0),
        tolerance=0.0,  # choices and copies
        stock=following,
        reset=reset,
    )


CASES = [KernelCase("acceptance", build)]
