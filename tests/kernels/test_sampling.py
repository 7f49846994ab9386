"""Philox, the counter-based draws, and the per-position statistics."""

import math

import pytest
import torch
import triton
import triton.language as tl
from tolerance import DEVICE, gaussian, slot_table, temperature

from redraft.config import DecodeSettings
from redraft.kernels.philox import philox, philox_words
from redraft.kernels.sampling import (
    SAMPLE,
    SampleSettings,
    Statistics,
    counter_statistics,
    exponential_noise,
    probabilities,
    random_tokens,
    sample,
    stock_statistics,
)
from redraft.kernels.state import SlotState

SEEDS = torch.tensor([1, 2**40 + 3])


PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(
    ("seed", "counters", "expected"),
    [
        (0, [0] * 4, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (-1, [0xFFFFFFFF] * 4, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (0x299F31D0 << 32 | 0xA4093822, PI, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ],
)
def test_philox_known_answers(seed, counters, expected):
    """The known-answer vectors of the authors' Random123 library; the digits of pi tell the counter words apart."""
    assert philox(torch.tensor(seed), *(torch.tensor(word) for word in counters)).tolist() == expected


def test_statistics_by_hand():
    logits = torch.tensor([[[0.0, math.log(3.0)], [5.0, 5.0]]])
    for stats in (
        counter_statistics(logits, torch.tensor([0]), canvas=0, step=1),
        stock_statistics(logits, torch.Generator().manual_seed(0)),
    ):
        assert stats.argmax.tolist() == [[1, 0]], "a tie goes to the lower id"
        torch.testing.assert_close(stats.confidence, torch.tensor([[0.75, 0.5]]))
        expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
        torch.testing.assert_close(stats.entropy, torch.tensor([[expected, math.log(2.0)]]))


def test_statistics_survive_extreme_logits():
    logits = torch.full((1, 3, 8), -math.inf)
    logits[0, 0, 2] = 0.0
    logits[0, 1] = 30.0
    logits[0, 2] = torch.tensor([3e4, 0, 0, 0, 0, 0, 0, -3e4])
    stats = counter_statistics(logits, torch.tensor([7]), canvas=3, step=9)
    torch.testing.assert_close(stats.entropy, torch.tensor([[0.0, math.log(8.0), 0.0]]), atol=3e-3, rtol=0)
    assert stats.argmax.tolist() == [[2, 0, 0]]
    assert stats.draw[0, 0] == 2
    assert stats.draw[0, 2] == 0


def test_entropies_agree():
    logits = torch.randn(2, 5, 300) * 4
    counter = counter_statistics(logits, SEEDS, 0, 1).entropy
    torch.testing.assert_close(counter, stock_statistics(logits, torch.Generator()).entropy, atol=1e-5, rtol=1e-5)


def test_draws_follow_the_distribution():
    """Chi-square over 20,000 positions and 8 tokens: 7 degrees of freedom, 99.9 % quantile 24.3."""
    probs = torch.tensor([0.5, 0.25, 0.1, 0.05, 0.05, 0.03, 0.015, 0.005])
    count = 20_000
    stats = counter_statistics(probs.log().expand(1, count, 8), torch.tensor([11]), canvas=0, step=1)
    observed = torch.bincount(stats.draw[0], minlength=8)
    chi_square = ((observed - probs * count) ** 2 / (probs * count)).sum()
    assert chi_square < 24.3


def test_noise_is_unit_exponential():
    noise = exponential_noise(torch.tensor([5]), 400, 500, canvas=0, step=1).flatten()
    assert noise.min() > 0
    assert abs(noise.mean() - 1) < 0.01
    assert abs(noise.var() - 1) < 0.03
    # P(E < x) = 1 - exp(-x), also far in the tail where u is tiny.
    for x in (1e-4, 0.1, 1.0, 5.0):
        expected = -math.expm1(-x)
        assert abs((noise < x).float().mean() - expected) < 5 * math.sqrt(expected / noise.numel())


def test_uniform_tokens():
    """Chi-square of 12,800 tokens over 32 values: 31 degrees of freedom, 99.9 % quantile 61.1."""
    tokens = random_tokens(torch.arange(200), 64, 32, canvas=0, step=0)
    observed = torch.bincount(tokens.flatten(), minlength=32)
    assert observed.numel() == 32
    assert ((observed - 400) ** 2 / 400).sum() < 61.1


def test_draws_depend_on_seed_canvas_step_and_position_only():
    logits = torch.zeros(2, 64, 1000)
    base = counter_statistics(logits, SEEDS, 1, 2).draw
    assert torch.equal(base[1:], counter_statistics(logits[1:], SEEDS[1:], 1, 2).draw)
    assert torch.equal(base[:, :10], counter_statistics(logits[:, :10], SEEDS, 1, 2).draw)
    for other in (
        counter_statistics(logits, SEEDS + 1, 1, 2).draw,
        counter_statistics(logits, SEEDS, 2, 2).draw,
        counter_statistics(logits, SEEDS, 1, 3).draw,
        base.flip(0),
        random_tokens(SEEDS, 64, 1000, 1, 2),
    ):
        assert (base == other).float().mean() < 0.05


CAP = 30.0
SMALL = SampleSettings(block=64, num_warps=4)


@triton.jit
def _philox_kernel(seed_ptr, out_ptr, c1, c2, c3, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    a, b, c, d = philox_words(tl.load(seed_ptr), index - 4, c1, c2, c3)
    for w, word in enumerate((a, b, c, d)):
        tl.store(out_ptr + index * 4 + w, word.to(tl.int64))


@pytest.mark.parametrize("seed", [0, -1, 2**40 + 3])
def test_philox_in_triton(seed):
    """Word for word, with counters on both sides of the wrap."""
    seeds, out = torch.tensor([seed], device=DEVICE), torch.empty(16, 4, dtype=torch.int64, device=DEVICE)
    _philox_kernel[(1,)](seeds, out, 2**31 - 1, -1, 7, BLOCK=16)
    expected = philox(seeds, torch.arange(-4, 12, device=DEVICE), *torch.tensor([2**31 - 1, -1, 7], device=DEVICE))
    assert torch.equal(out, expected)


def make_slots(*settings, step=0, canvas=0):
    """A setting a lane, and a slot more that is done, in the order of `slot_table`."""
    state = SlotState.allocate(len(settings) + 1, DEVICE)
    for b, (slot, setting) in enumerate(zip(lanes(state).tolist(), settings, strict=True)):
        state.seed[slot], state.canvas_index[slot] = [1, 2**40 + 3, -5][b], canvas + b
        state.step[slot] = step + b
        state.done[slot] = 0
        state.temperature[slot] = temperature(setting, step + b + 1)
    return state


def lanes(state):
    return slot_table(state.step.shape[0] - 1)


def sampled(logits, slots, settings=SMALL):
    """What `sample` writes into outputs full of nonsense."""
    rows = logits.shape[0]
    out = {name: torch.full((rows,), -7, dtype=torch.int32, device=DEVICE) for name in ("draw", "argmax")}
    out |= {name: torch.full((rows,), math.nan, device=DEVICE) for name in ("entropy", "confidence", "log_norm")}
    sample(logits, slots, lanes(slots), CAP, settings=settings, **out)
    return out


def scaled(logits, settings, slots):
    """The reference's input: soft-capped logits over each slot's temperature, [B, C, V]."""
    capped = torch.tanh(logits.float() / CAP) * CAP
    steps = [temperature(s, int(slots.step[slot]) + 1) for slot, s in zip(lanes(slots), settings, strict=True)]
    per_slot = torch.tensor(steps, device=logits.device)
    return capped.view(len(settings), -1, logits.shape[1]) / per_slot[:, None, None]


def reference(logits, settings, slots):
    """counter_statistics slot by slot, flattened."""
    parts = [
        counter_statistics(x[None], slots.seed[b : b + 1], int(slots.canvas_index[b]), int(slots.step[b]) + 1)
        for b, x in zip(lanes(slots).tolist(), scaled(logits, settings, slots), strict=True)
    ]
    return Statistics(
        *(torch.cat([getattr(p, n)[0] for p in parts]) for n in ("draw", "argmax", "entropy", "confidence"))
    )


def check(logits, settings, slots, out, atol=1e-4):
    """argmax exact; the draw may only differ where two scores are as close as their rounding."""
    expected = reference(logits, settings, slots)
    assert torch.equal(out["argmax"].long(), logits.float().argmax(-1))
    torch.testing.assert_close(out["entropy"], expected.entropy.clamp(min=0), atol=atol, rtol=1e-4)
    torch.testing.assert_close(out["confidence"], expected.confidence, atol=atol, rtol=1e-4)
    x = scaled(logits, settings, slots)
    torch.testing.assert_close(out["log_norm"], x.flatten(0, 1).logsumexp(-1), atol=1e-4, rtol=1e-5)
    count, seeds = x.shape[1], slots.seed
    for row in (out["draw"].long() != expected.draw).nonzero().flatten().tolist():
        b = int(lanes(slots)[row // count])
        noise = exponential_noise(seeds[b : b + 1], *x.shape[1:], int(slots.canvas_index[b]), int(slots.step[b]) + 1)
        score = x[row // count, row % count] - noise[0, row % count].log()
        assert score[out["draw"][row].long()] > score.max() - 1e-3, f"row {row}: a clearly smaller score was drawn"
    return (out["draw"].long() == expected.draw).float().mean()


@pytest.mark.parametrize("vocab", [64, 256, 300, 1])
@pytest.mark.parametrize("spread", [0.1, 4.0, 40.0])
def test_sample_against_reference(vocab, spread):
    settings = [DecodeSettings(), DecodeSettings(max_denoising_steps=7, t_min=0.5, t_max=1.3)]
    slots, logits = make_slots(*settings, step=3, canvas=2), gaussian(4, vocab, scale=spread)
    assert check(logits, settings, slots, sampled(logits, slots)) == 1


@pytest.mark.parametrize("t", [0.4, 0.05, 1e-3])
def test_sample_at_small_temperatures(t):
    """Below T = cap * log2(e) / 108.5 = 0.3989 the kernel looks for the maximum first: exp(30 / T) would overflow.

    The scaled logits reach 30 / T, so that fp32 knows the entropy's terms to about 30 / T * 2^-22.
    """
    settings = [DecodeSettings(t_min=t, t_max=t)]
    slots, logits = make_slots(*settings), gaussian(3, 200, scale=20)
    logits[0] = -20.0
    logits[1, 7:9] = 40.0
    assert check(logits, settings, slots, sampled(logits, slots), atol=max(1e-4, 30 / t * 2**-20)) == 1


def test_sample_extremes():
    """-inf and huge logits cap at -+30; ties, across tiles and where the cap hides a difference; NaN in one row."""
    slots, logits = make_slots(DecodeSettings()), torch.zeros(7, 200, device=DEVICE).bfloat16()
    logits[:2] = -math.inf
    logits[1, 150] = 0.0
    logits[2, 70], logits[2, 199] = 3e38, math.inf
    logits[3, [60, 64, 130]] = 5.0
    logits[4, 10], logits[4, 20] = 1000.0, 1008.0
    logits[5], logits[6] = -3e38, math.nan
    out = sampled(logits, slots)
    assert out["argmax"][:6].tolist() == [0, 150, 199, 60, 20, 0]
    assert 0 <= int(out["argmax"][6]) < 200 and 0 <= int(out["draw"][6]) < 200
    expected = reference(logits, [DecodeSettings()], slots)
    torch.testing.assert_close(out["entropy"][:6], expected.entropy[:6].clamp(min=0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out["confidence"][:6], expected.confidence[:6], atol=1e-5, rtol=1e-4)
    assert torch.equal(out["draw"][:6].long(), expected.draw[:6])


def test_a_sure_position_has_no_entropy():
    """One logit far above the rest: entropy below 1e-6, where the difference of two sums near 75 would show 1e-5."""
    logits = torch.full((1, 256), -20.0, device=DEVICE).bfloat16()
    logits[0, 3] = 25.0
    out = sampled(logits, make_slots(DecodeSettings()))
    assert 0 <= out["entropy"].item() < 1e-5
    assert out["confidence"].item() == 1


def test_done_slots_are_left_alone():
    slots, logits = make_slots(DecodeSettings(), DecodeSettings()), gaussian(4, 100)
    slots.done[lanes(slots)[0]] = 1
    out = sampled(logits, slots)
    assert out["draw"][:2].tolist() == [-7] * 2
    assert out["entropy"][:2].isnan().all()
    assert out["entropy"][2:].isfinite().all()
    probabilities(logits, out["log_norm"], slots, lanes(slots), CAP, out=logits, settings=SMALL)
    assert (logits[:2] == 0).all()
    torch.testing.assert_close(logits[2:].float().sum(-1), torch.ones(2, device=DEVICE), atol=1e-2, rtol=0)


def test_the_draw_does_not_depend_on_the_batch():
    settings = [DecodeSettings(), DecodeSettings(t_max=1.0)]
    slots, alone, logits = make_slots(*settings, step=2), make_slots(settings[1], step=3), gaussian(4, 200)
    out = sampled(logits, slots)
    alone.seed[1], alone.canvas_index[1] = slots.seed[1], slots.canvas_index[1]
    for name, value in sampled(logits[2:], alone).items():
        assert torch.equal(out[name][2:], value), name


@pytest.mark.parametrize("vocab", [64, 300])
@pytest.mark.parametrize("in_place", [False, True])
def test_probabilities_against_reference(vocab, in_place):
    """BF16 rounds to 2^-8 of a value at most; 1e-3 is room for the exponentials' own 2^-22 of logits up to 30 / T."""
    settings = [DecodeSettings(), DecodeSettings(t_min=0.1, t_max=0.2)]
    slots, logits = make_slots(*settings, step=1), gaussian(2, vocab, scale=5)
    out = sampled(logits, slots)
    expected = scaled(logits, settings, slots).softmax(-1).flatten(0, 1)
    target = logits if in_place else torch.full_like(logits, math.nan)
    probabilities(logits, out["log_norm"], slots, lanes(slots), CAP, out=target, settings=SMALL)
    torch.testing.assert_close(target.float(), expected, rtol=2**-8 + 1e-3, atol=1e-30)


@pytest.mark.gpu
def test_sampled_draws_follow_the_distribution():
    """Chi-square of 50,000 draws over 8 tokens through the kernel: 99.9 % quantile of 7 degrees of freedom is 24.3."""
    settings, rows = DecodeSettings(t_min=1.0, t_max=1.0), 50_000
    slots, values = make_slots(settings), [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0]
    logits = torch.tensor(values, device=DEVICE).bfloat16().repeat(rows, 1)
    expected = scaled(logits, [settings], slots)[0, 0].softmax(-1) * rows
    observed = torch.bincount(sampled(logits, slots)["draw"].long(), minlength=8)
    assert ((observed - expected) ** 2 / expected).sum() < 24.3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "vocab"), [(1, 262_144), (17, 262_144), (255, 262_144), (257, 262_144), (256, 100_003)]
)
@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_sample_at_real_shapes(rows, vocab, spread):
    settings = [DecodeSettings()]
    slots, logits = make_slots(*settings, step=20), gaussian(rows, vocab, scale=spread)
    out, again = (sampled(logits, slots, SAMPLE) for _ in range(2))
    assert check(logits, settings, slots, out) > 0.99
    assert all(torch.equal(out[name], again[name]) for name in out)
    expected = scaled(logits, settings, slots)[0].softmax(-1)
    probabilities(logits, out["log_norm"], slots, lanes(slots), CAP, out=logits)
    torch.testing.assert_close(logits.float(), expected, rtol=2**-8 + 1e-3, atol=1e-30)


@pytest.mark.gpu
def test_rows_beyond_two_gigabytes_of_entries():
    """Row 8,200 of 262,144 starts past 2^31 entries."""
    rows = 8_256
    slots, logits = make_slots(DecodeSettings()), torch.zeros(rows, 262_144, dtype=torch.bfloat16, device=DEVICE)
    logits[-1, 5] = 20.0
    out = sampled(logits, slots, None)
    assert out["argmax"][-1] == 5 and out["argmax"][:-1].max() == 0
    probabilities(logits, out["log_norm"], slots, lanes(slots), CAP, out=logits)
    assert logits[-1, 5] == 1
