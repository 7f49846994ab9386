"""kernels/sampling.py: statistics of the raw logits, and the probabilities that the next pass is conditioned on.

The draw must repeat but is not compared: the kernel's fast logarithm may decide a near tie the other way. Its
distribution is a matter for the tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from redraft.bench.cases.inputs import SETTINGS, choices, first_pass, gaussian, lanes
from redraft.bench.kernels import KernelCase, Problem, Scale
from redraft.bench.roofline import Work
from redraft.kernels.sampling import PROBABILITIES, SAMPLE, probabilities, sample


def _scaled(scale: Scale, raw: torch.Tensor) -> torch.Tensor:
    """fp32 logits after soft-cap and temperature of a first pass, t_max."""
    cap = scale.config.final_logit_softcap
    return torch.tanh(raw.float() / cap) * (cap / SETTINGS.t_max)


def statistics(scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    config, rows, vocab = scale.config, scale.rows, scale.config.vocab_size
    raw, state, slots = gaussian(scale, generator, rows, vocab, std=4.0), first_pass(scale), lanes(scale)
    draw, argmax = (torch.empty(rows, dtype=torch.int64, device=scale.device) for _ in range(2))
    entropy, confidence, log_norm = (torch.empty(rows, device=scale.device) for _ in range(3))
    settings = dataclasses.replace(SAMPLE, **changes)
    outputs = {
        "draw": draw, "argmax": argmax, "entropy": entropy, "confidence": confidence, "log_norm": log_norm
    }  # fmt: skip

    def reference() -> dict[str, torch.Tensor]:
        logits = _scaled(scale, raw)
        probs = torch.softmax(logits, dim=-1)
        norm = logits.logsumexp(dim=-1)
        ids = torch.arange(vocab, device=scale.device)
        first = torch.where(raw == raw.amax(dim=-1, keepdim=True), ids, vocab).amin(dim=-1)
        return {
            "argmax": first,
            "entropy": norm - (probs * logits).sum(dim=-1),
            "confidence": probs.amax(dim=-1),
            "log_norm": norm,
        }

    def stock() -> object:
        """The sampling step of transformers: soft-cap, softmax, multinomial, argmax, two entropies, and the cast."""
        logits = _scaled(scale, raw)
        probs = torch.softmax(logits, dim=-1, dtype=torch.float32)
        entropies = [torch.distributions.Categorical(logits=logits, validate_args=False).entropy() for _ in range(2)]
        return torch.multinomial(probs, 1), logits.argmax(dim=-1), entropies, logits.to(scale.dtype)

    return Problem(
        run=lambda: sample(raw, state, slots, config.final_logit_softcap, **outputs, settings=settings),
        outputs=outputs,
        reference=reference,
        work=Work(raw.nbytes + sum(t.nbytes for t in outputs.values()), 20 * raw.numel()),
        tolerance=1e-4,  # nats of entropy on values near 1; the kernel's exponentials are good to 2^-22
        stock=stock,
    )


def soft(scale: Scale, generator: torch.Generator, changes: Mapping[str, Any]) -> Problem:
    config = scale.config
    raw, state, slots = (
        gaussian(scale, generator, scale.rows, config.vocab_size, std=4.0),
        first_pass(scale),
        lanes(scale),
    )
    log_norm, out = _scaled(scale, raw).logsumexp(dim=-1), torch.empty_like(raw)
    settings = dataclasses.replace(PROBABILITIES, **changes)
    return Problem(
        run=lambda: probabilities(raw, log_norm, state, slots, config.final_logit_softcap, out=out, settings=settings),
        outputs={"out": out},
        reference=lambda: {"out": torch.softmax(_scaled(scale, raw), dim=-1)},
        work=Work(raw.nbytes + out.nbytes + log_norm.nbytes, 10 * raw.numel()),
        tolerance=6e-3,  # one rounding to BF16
        stock=lambda: torch.softmax(_scaled(scale, raw), dim=-1).to(scale.dtype),
        compiles=True,
    )


_BLOCKS = (*choices(block=(2048, 4096, 8192), num_warps=(8,)), {"block": 8192, "num_warps": 16})
CASES = [
    KernelCase("sampling.statistics", statistics, _BLOCKS),
    KernelCase("sampling.probabilities", soft, _BLOCKS),
]
