"""What a denoising pass says about each position: argmax, entropy, confidence, and one drawn token.

Two ways to draw. `stock_statistics` uses torch's own generator exactly as transformers does. `counter_statistics` uses
the Gumbel-max trick with counter-based noise: token = argmax(logits - log E), E = -log(1 - u) exponential, u from
Philox keyed by the request's seed and counted by (vocabulary entry, position, pass, canvas), so a draw does not depend
on the batch, on earlier draws or on the device.

`sample` computes the same statistics from the head's raw BF16 logits x in one pass over each row, one program a row.
With r = 1 / (1 + exp(2 x / cap)), the soft-capped, temperature-scaled logit is an affine function of r,

    cap * tanh(x / cap) / T = (cap / T) * (1 - 2 r),

so the loop keeps sum(p), sum(p * r) and the largest score in terms of r. Three things keep it short. Soft-capped logits
are bounded, so exponentials need no running maximum unless T is very small. The cap is increasing, so the argmax is
that of the raw logits, the lowest id of equal ones (where the cap rounds two logits to one value, only the raw ones
tell them apart). Each thread remembers the tile of its best entry only; its index is found by reading that tile again.
`probabilities` writes softmax(logits / T) in BF16 for self-conditioning.
"""

from dataclasses import dataclass

import torch

from redraft.kernels.launch import INTERPRET, after_previous, early_launch, rounded, tl, triton
from redraft.kernels.philox import philox, philox_words
from redraft.kernels.state import SlotState
from redraft.kernels.tables import LaunchSettings, run

# The last counter word is canvas * 2 + purpose, so that a pass's draws and its re-draws never share a number.
DRAW, REDRAW = 0, 1


@dataclass
class Statistics:
    """One denoising pass, per position. All tensors are [B, C]."""

    draw: torch.Tensor  # int64, a token drawn from softmax(logits)
    argmax: torch.Tensor  # int64
    entropy: torch.Tensor  # fp32, nats
    confidence: torch.Tensor  # fp32, the largest probability
    redraw: torch.Tensor | None = None  # int64, a uniform token; None: the rule makes counter-based ones where needed


def stock_statistics(logits: torch.Tensor, generator: torch.Generator) -> Statistics:
    """Statistics of temperature-scaled logits [B, C, V] fp32; advances `generator` as transformers' sampler does."""
    batch, length, vocab = logits.shape
    probs = torch.softmax(logits, dim=-1, dtype=torch.float32)
    draw = torch.multinomial(probs.view(-1, vocab), num_samples=1, generator=generator).view(batch, length)
    entropy = torch.distributions.Categorical(logits=logits, validate_args=False).entropy()
    return Statistics(draw, logits.argmax(dim=-1), entropy, probs.amax(dim=-1))


def counter_statistics(logits: torch.Tensor, seeds: torch.Tensor, canvas: int, step: int) -> Statistics:
    """Statistics of temperature-scaled logits [B, C, V] fp32 with noise from `seeds` int64 [B]."""
    log_norm = logits.logsumexp(dim=-1)
    # exp(l - norm) * l summed this way stays finite for logits of -inf.
    probs = torch.softmax(logits, dim=-1)
    entropy = log_norm - torch.where(probs > 0, probs * logits, 0.0).sum(dim=-1)
    noise = exponential_noise(seeds, logits.shape[1], logits.shape[2], canvas, step)
    draw = (logits - noise.log()).argmax(dim=-1)
    return Statistics(draw, logits.argmax(dim=-1), entropy, probs.amax(dim=-1))


def exponential_noise(seeds: torch.Tensor, length: int, vocab: int, canvas: int, step: int) -> torch.Tensor:
    """Unit exponential noise fp32 [B, length, vocab]; entry v of a position uses word v % 4 of counter v // 4."""
    device = seeds.device
    blocks = torch.arange((vocab + 3) // 4, device=device)
    positions = torch.arange(length, device=device)[:, None]
    last = torch.tensor(canvas * 2 + DRAW, device=device)
    words = philox(seeds[:, None, None], blocks, positions, torch.tensor(step, device=device), last)
    u = (words.flatten(-2)[..., :vocab].float() + 0.5) * 2.0**-32
    # -log(1 - u), by its series where 1 - u would lose u's digits.
    return torch.where(u < 2.0**-12, u + 0.5 * u * u, -torch.log1p(-u))


def random_tokens(seeds: torch.Tensor, length: int, vocab: int, canvas: int, step: int) -> torch.Tensor:
    """Uniform tokens int64 [B, length]: step 0 is the first canvas, step s the re-draw after pass s."""
    device = seeds.device
    zero, counter_step, last = torch.tensor([0, step, canvas * 2 + REDRAW], device=device)
    words = philox(seeds[:, None], zero, torch.arange(length, device=device), counter_step, last)
    # Multiply-shift maps 32 random bits to 0..vocab-1 with a bias below vocab / 2^32.
    return (words[..., 0] * vocab) >> 32


@dataclass(frozen=True)
class SampleSettings(LaunchSettings):
    """Launch settings: entries a tile, of which each thread takes 8 or a multiple; None leaves registers alone."""

    tiles = ("block",)

    block: int
    num_warps: int
    max_registers: int | None = None


# Two programs of 16 warps fill a multiprocessor at 64 registers a thread (76 without the limit; nothing spills). The
# loop is 319 instructions for 8 entries, 40 of them on the special-function unit, 8 cycles each: both bounds allow
# 91 us for 256 rows of 262,144 on an H200, where reading the logits takes 33.
SAMPLE = SampleSettings(block=4096, num_warps=16, max_registers=64)
PROBABILITIES = SampleSettings(block=8192, num_warps=8)


def sample(
    logits: torch.Tensor, state: SlotState, slots: torch.Tensor, softcap: float, *, draw: torch.Tensor,
    argmax: torch.Tensor, entropy: torch.Tensor, confidence: torch.Tensor, log_norm: torch.Tensor,
    settings: SampleSettings | None = None,
) -> None:  # fmt: skip
    """Statistics of the pass under way from raw head outputs [R, V], R = W * C; BF16, rows contiguous.

    Rows of lane i belong to slot slots[i], int32 [W]. Writes draw and argmax (any integer type) and entropy, confidence
    and log_norm fp32, all [R]; log_norm is the log-sum-exp of the scaled logits in nats, which `probabilities` needs.
    Rows of slots that are done stay as they are.
    """
    rows, vocab = logits.shape
    run("sampling.statistics", settings, SAMPLE, lambda s: _sample_kernel[(rows,)](
        logits, draw, argmax, entropy, confidence, log_norm,
        state.seed, state.canvas_index, state.step, state.done, state.temperature, slots,
        rows // slots.shape[0], softcap, VOCAB=vocab, BLOCK=s.block, num_warps=s.num_warps,
        maxnreg=s.max_registers, **early_launch(),
    ))  # fmt: skip


def probabilities(
    logits: torch.Tensor, log_norm: torch.Tensor, state: SlotState, slots: torch.Tensor, softcap: float, *,
    out: torch.Tensor, settings: SampleSettings | None = None,
) -> None:  # fmt: skip
    """softmax of the scaled logits [R, V] to out BF16, which may be `logits` itself; zeros for slots that are done.

    Runs after `sample` and before the step is counted. The scaled logits are not rounded to BF16 first, as transformers
    does between passes: model.py keeps them in fp32, and a BF16 logit near 50 is off by up to 13 % in probability.
    """
    rows, vocab = logits.shape
    kernel = _probabilities_kernel
    run("sampling.probabilities", settings, PROBABILITIES, lambda s: kernel[(rows, triton.cdiv(vocab, s.block))](
        logits, log_norm, out, state.done, state.temperature, slots, rows // slots.shape[0], softcap,
        VOCAB=vocab, BLOCK=s.block, num_warps=s.num_warps, maxnreg=s.max_registers, **early_launch(),
    ))  # fmt: skip


LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# exp2 of scaled logits up to this bound, and sums of 2^19 of them, stay finite and normal in fp32: T = 0.4 at cap 30.
BOUND = tl.constexpr(108.5)


# The approximate instructions without the scaling of subnormals that Triton wraps around them: relative error 2^-22.
@triton.jit
def _exp2(x):
    if INTERPRET:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _log2(x):
    if INTERPRET:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _reciprocal(x):
    if INTERPRET:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _uniform(word):
    """(word rounded to fp32 + 1/2) / 2^32. Halves become floats by their bit pattern, cheaper than a conversion."""
    high = ((word >> 16) | 0x4B000000).to(tl.float32, bitcast=True)  # 2^23 + high half
    low = ((word & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True)
    exact = high * 0.0000152587890625 - 128.001953125  # high * 2^-16 - 2^7 - 2^-9
    return (low * 2.3283064365386963e-10 + exact) + 1.1641532182693481e-10  # * 2^-32, + 2^-33


@triton.jit
def _log2_exponential(word):
    """log2 of a unit exponential draw, up to a constant. 1 - u would lose a small u, which takes the series instead."""
    u = _uniform(word)
    series = u * (1.4426950408889634 + u * (0.7213475204444817 + u * 0.4808983469629878))
    return _log2(tl.where(u < 0.0078125, series, -_log2(1.0 - u)))


@triton.jit
def _noise(seed, start, position, step, last, BLOCK: tl.constexpr):
    """log2 of the exponential noise of entries start .. start + BLOCK - 1 as [BLOCK / 8, 8]."""
    block = (start // 4) + tl.arange(0, BLOCK // 8) * 2
    a, b, c, d = philox_words(seed, block, position, step, last)
    e, f, g, h = philox_words(seed, block + 1, position, step, last)
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return _log2_exponential(tl.join(even, odd).reshape(BLOCK // 8, 8))


@triton.jit
def _entries(row_ptr, start, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Raw logits fp32 [BLOCK / 8, 8] from `start`, their mask, and their offsets in the tile."""
    offset = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = start + offset < VOCAB
    if VOCAB % BLOCK == 0:
        x = tl.load(row_ptr + start + offset)
    else:
        x = tl.load(row_ptr + start + offset, mask=inside, other=float("-inf"))
    return x.to(tl.float32), inside, offset


@triton.jit
def _capped(x, softcap):
    """r = (1 - tanh(x / cap)) / 2, between 0 and 1."""
    return _reciprocal(1.0 + _exp2(x * (1.0 / softcap * (2.0 * LOG2E))))


@triton.jit
def _sample_kernel(
    logits_ptr, draw_ptr, argmax_ptr, entropy_ptr, confidence_ptr, log_norm_ptr,
    seed_ptr, canvas_ptr, step_ptr, done_ptr, temperature_ptr, slots_ptr,
    rows_per_lane, softcap, VOCAB: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row // rows_per_lane)
    if tl.load(done_ptr + slot) != 0:
        return
    row_ptr = logits_ptr + row.to(tl.int64) * VOCAB
    position, step = row % rows_per_lane, tl.load(step_ptr + slot) + 1
    seed, last = tl.load(seed_ptr + slot), tl.load(canvas_ptr + slot) * 2  # purpose DRAW is 0
    # In base 2 a scaled logit is scale * (1 - 2 r).
    scale = softcap * LOG2E / tl.load(temperature_ptr + slot)
    shift = 0.0
    if scale > BOUND:
        highest = tl.full((BLOCK // 8,), float("-inf"), tl.float32)
        for start in range(0, VOCAB, BLOCK):
            x, inside, offset = _entries(row_ptr, start, VOCAB, BLOCK)
            highest = tl.maximum(highest, tl.max(x, 1))
        shift = scale * (1.0 - 2.0 * _capped(tl.max(highest, 0), softcap))

    norm = tl.zeros((BLOCK // 8,), tl.float32)
    moment = tl.zeros((BLOCK // 8,), tl.float32)
    top = tl.full((BLOCK // 8,), float("-inf"), tl.float32)
    best = tl.full((BLOCK // 8,), float("-inf"), tl.float32)
    top_tile = tl.zeros((BLOCK // 8,), tl.int32)
    best_tile = tl.zeros((BLOCK // 8,), tl.int32)
    for start in range(0, VOCAB, BLOCK):
        x, inside, offset = _entries(row_ptr, start, VOCAB, BLOCK)
        r = _capped(x, softcap)
        p = _exp2(r * (-2.0 * scale) + (scale - shift))
        score = r * (-2.0 * scale) - _noise(seed, start, position, step, last, BLOCK)
        if VOCAB % BLOCK != 0:
            p = tl.where(inside, p, 0.0)
            score = tl.where(inside, score, float("-inf"))
        norm += tl.sum(p, 1)
        moment += tl.sum(p * r, 1)
        tile_top, tile_best = tl.max(x, 1), tl.max(score, 1)
        top_tile = tl.where(tile_top > top, start, top_tile)
        top = tl.maximum(top, tile_top)
        best_tile = tl.where(tile_best > best, start, best_tile)
        best = tl.maximum(best, tile_best)

    total, mean = tl.sum(norm, 0), tl.sum(moment, 0)
    highest = tl.max(top, 0)
    r_top = _capped(highest, softcap)
    p_top = _exp2(r_top * (-2.0 * scale) + (scale - shift))
    # Against the largest logit, so that the entropy of a sure position is not the difference of two large numbers.
    spread = tl.log2(total / p_top)
    tl.store(entropy_ptr + row, tl.maximum(spread + 2.0 * scale * (mean / total - r_top), 0.0) * LN2)
    tl.store(confidence_ptr + row, p_top / total)
    tl.store(log_norm_ptr + row, (scale * (1.0 - 2.0 * r_top) + spread) * LN2)

    # The lowest index is in the first tile that holds the maximum. The minimum guards against a row of NaN.
    start = tl.min(tl.where(top == highest, top_tile, VOCAB), 0)
    x, inside, offset = _entries(row_ptr, tl.minimum(start, VOCAB - 1) // BLOCK * BLOCK, VOCAB, BLOCK)
    index = start + tl.min(tl.where((x == highest) & inside, offset, VOCAB))
    tl.store(argmax_ptr + row, tl.minimum(index, VOCAB - 1))

    start = tl.min(tl.where(best == tl.max(best, 0), best_tile, VOCAB), 0)
    start = tl.minimum(start, VOCAB - 1) // BLOCK * BLOCK
    x, inside, offset = _entries(row_ptr, start, VOCAB, BLOCK)
    score = _capped(x, softcap) * (-2.0 * scale) - _noise(seed, start, position, step, last, BLOCK)
    score = tl.where(inside, score, float("-inf"))
    index = start + tl.min(tl.where((score == tl.max(score)) & inside, offset, VOCAB))
    tl.store(draw_ptr + row, tl.minimum(index, VOCAB - 1))


@triton.jit
def _probabilities_kernel(
    logits_ptr, log_norm_ptr, out_ptr, done_ptr, temperature_ptr, slots_ptr,
    rows_per_lane, softcap, VOCAB: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    row, start = tl.program_id(0), tl.program_id(1) * BLOCK
    slot = tl.load(slots_ptr + row // rows_per_lane)
    row_start = row.to(tl.int64) * VOCAB
    offset = start + tl.arange(0, BLOCK)
    inside = offset < VOCAB
    if tl.load(done_ptr + slot) != 0:
        tl.store(out_ptr + row_start + offset, tl.zeros((BLOCK,), out_ptr.dtype.element_ty), mask=inside)
        return
    scale = softcap * LOG2E / tl.load(temperature_ptr + slot)
    x = tl.load(logits_ptr + row_start + offset, mask=inside, other=0.0).to(tl.float32)
    p = _exp2(_capped(x, softcap) * (-2.0 * scale) + (scale - tl.load(log_norm_ptr + row) * LOG2E))
    tl.store(out_ptr + row_start + offset, rounded(p, out_ptr.dtype.element_ty), mask=inside)
