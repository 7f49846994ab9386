"""kernels/acceptance.py: the end of a pass, from its statistics to the next canvas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from redraft.bench.cases.inputs import SETTINGS, first_pass, lanes
from redraft.bench.kernels import KernelCase, Problem, Scale
from redraft.bench.roofline import Work
from redraft.decode.entropy_bound import ENTROPY_BOUND, accept
from redraft.kernels.acceptance import finish_pass
from redraft.kernels.sampling import random_tokens
from redraft.kernels.state import Canvases


def build(scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    batch, length, vocab = scale.batch, scale.config.canvas_length, scale.config.vocab_size
    slots, canvases = first_pass(scale), Canvases.allocate(batch, length, scale.device)
    own, table = ENTROPY_BOUND.allocate(batch, length, vocab, scale.device), lanes(scale)
    draw, argmax = (torch.randint(vocab, (scale.rows,), generator=generator, device=scale.device) for _ in range(2))
    for slot in range(batch):
        ENTROPY_BOUND.configure(own, slot, SETTINGS)
    own.max_steps.fill_(10**9)  # timing repeats the pass: it must not be the last, after which nothing is done
    # Multiples of 2^-12 have exact sums, in whatever order and precision.
    entropy = torch.randint(64, (scale.rows,), generator=generator, device=scale.device).float() * 2.0**-12
    outputs = {"tokens": canvases.tokens, "argmax": canvases.argmax, "entropy": canvases.entropy}

    def following() -> torch.Tensor:
        accepted = accept(entropy.view(batch, length), SETTINGS.entropy_bound)
        redraw = random_tokens(slots.seed[table], length, vocab, canvas=0, step=1)
        return by_slot(torch.where(accepted, draw.view(batch, length), redraw))

    def by_slot(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.view(batch, length)
        return torch.empty_like(rows).index_copy_(0, table.long(), rows).flatten()

    def reset() -> None:
        slots.step.zero_()
        slots.done.zero_()
        own.equal.zero_()

    return Problem(
        run=lambda: finish_pass(draw, argmax, entropy, table, slots, own, canvases),
        outputs=outputs,
        reference=lambda: {"tokens": following(), "argmax": by_slot(argmax), "entropy": by_slot(entropy)},
        work=Work(draw.nbytes + argmax.nbytes + entropy.nbytes + sum(t.nbytes for t in outputs.values()), 0),
        tolerance=0.0,  # choices and copies
        stock=following,
        reset=reset,
    )


CASES = [KernelCase("acceptance", build)]
