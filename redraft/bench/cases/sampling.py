"""kernels/sampling.py and acceptance.py: from raw logits to the next canvas, and what the next pass is conditioned on.

The draw must repeat but is not compared: the kernel's fast logarithm may decide a near tie the other way. Its
distribution is a matter for the tests.
"""

from dataclasses import replace
from functools import partial

import torch

from redraft.bench.cases.case import Changes, KernelCase, Problem, Scale, Tensors
from redraft.bench.cases.inputs import SETTINGS, by_formula, candidates, first_pass, gaussian, lanes
from redraft.bench.roofline import Work
from redraft.decode.entropy_bound import ENTROPY_BOUND, accept
from redraft.kernels.acceptance import finish_pass
from redraft.kernels.sampling import PROBABILITIES, SAMPLE, probabilities, random_tokens, sample
from redraft.kernels.state import Canvases


def _scaled(scale: Scale, raw: torch.Tensor) -> torch.Tensor:
    """fp32 logits after soft-cap and temperature of a first pass, t_max."""
    cap = scale.config.final_logit_softcap
    return torch.tanh(raw.float() / cap) * (cap / SETTINGS.t_max)


def statistics(scale: Scale, generator: torch.Generator, changes: Changes) -> Problem:
    config, rows, vocab = scale.config, scale.rows, scale.config.vocab_size
    raw, state, slots = gaussian(scale, generator, rows, vocab, std=4.0), first_pass(scale), lanes(scale)
    outputs = {name: torch.empty(rows, dtype=torch.int64, device=scale.device) for name in ("draw", "argmax")}
    outputs |= {name: torch.empty(rows, device=scale.device) for name in ("entropy", "confidence", "log_norm")}
    settings = replace(SAMPLE, **changes)

    def reference() -> Tensors:
        logits = _scaled(scale, raw)
        probs, norm = torch.softmax(logits, dim=-1), logits.logsumexp(dim=-1)
        ids = torch.arange(vocab, device=scale.device)
        first = torch.where(raw == raw.amax(dim=-1, keepdim=True), ids, vocab).amin(dim=-1)
        entropy = norm - (probs * logits).sum(dim=-1)
        return {"argmax": first, "entropy": entropy, "confidence": probs.amax(dim=-1), "log_norm": norm}

    def stock() -> object:
        """The sampling step of transformers: soft-cap, softmax, multinomial, argmax, two entropies, and the cast."""
        logits = _scaled(scale, raw)
        probs = torch.softmax(logits, dim=-1, dtype=torch.float32)
        entropies = [torch.distributions.Categorical(logits=logits, validate_args=False).entropy() for _ in range(2)]
        return torch.multinomial(probs, 1), logits.argmax(dim=-1), entropies, logits.to(scale.dtype)

    return Problem(
        run=partial(sample, raw, state, slots, config.final_logit_softcap, **outputs, settings=settings),
        outputs=outputs,
        reference=reference,
        work=Work(raw.nbytes + sum(t.nbytes for t in outputs.values()), 20 * raw.numel()),
        tolerance=1e-4,  # nats of entropy on values near 1; the kernel's exponentials are good to 2^-22
        stock=stock,
    )


def soft(scale: Scale, generator: torch.Generator, changes: Changes) -> Problem:
    """The probabilities that the next pass is conditioned on."""
    raw = gaussian(scale, generator, scale.rows, scale.config.vocab_size, std=4.0)
    log_norm, out = _scaled(scale, raw).logsumexp(dim=-1), torch.empty_like(raw)
    given = (raw, log_norm, first_pass(scale), lanes(scale), scale.config.final_logit_softcap)
    return by_formula(
        partial(probabilities, *given, out=out, settings=replace(PROBABILITIES, **changes)),
        {"out": out},
        lambda raw: torch.softmax(_scaled(scale, raw), dim=-1).to(raw.dtype),
        (raw,),
        Work(raw.nbytes + out.nbytes + log_norm.nbytes, 10 * raw.numel()),
        tolerance=6e-3,  # one rounding to BF16
    )


def acceptance(scale: Scale, generator: torch.Generator, changes: Changes) -> Problem:
    """The end of a pass, from its statistics to the next canvas."""
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
        for tensor in (slots.step, slots.done, own.equal):
            tensor.zero_()

    return Problem(
        run=partial(finish_pass, draw, argmax, entropy, table, slots, own, canvases),
        outputs=outputs,
        reference=lambda: {"tokens": following(), "argmax": by_slot(argmax), "entropy": by_slot(entropy)},
        work=Work(draw.nbytes + argmax.nbytes + entropy.nbytes + sum(t.nbytes for t in outputs.values()), 0),
        tolerance=0.0,  # choices and copies
        stock=following,
        reset=reset,
    )


BLOCKS = candidates("block num_warps", (2048, 8), (4096, 8), (8192, 8), (8192, 16))
CASES = [
    KernelCase("sampling.statistics", statistics, BLOCKS),
    KernelCase("sampling.probabilities", soft, BLOCKS),
    KernelCase("acceptance", acceptance),
]
