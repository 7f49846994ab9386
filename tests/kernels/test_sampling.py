"""Philox, the counter-based draws, and the per-position statistics."""

import math

import pytest
import torch
import triton
import triton.language as tl
from tolerance import DEVICE, gaussian, slot_table, temperature

from redraft.config import DecodeSettings
from redraft.kernels import sampling
from redraft.kernels.philox import philox, philox_words
from redraft.kernels.sampling import Statistics, counter_statistics, exponential_noise, random_tokens, stock_statistics
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
SMALL = sampling.SampleSettings(block=64, num_warps=4)


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


class Pass:
    """Slots in the middle of their canvases: a setting a lane, and a slot more that is done."""

    def __init__(self, *settings, step=0, canvas=0):
        self.state, self.lanes = SlotState.allocate(len(settings) + 1, DEVICE), slot_table(len(settings))
        for b, (slot, setting) in enumerate(zip(self.lanes.tolist(), settings, strict=True)):
            self.state.seed[slot], self.state.canvas_index[slot] = [1, 2**40 + 3, -5][b], canvas + b
            self.state.step[slot], self.state.done[slot] = step + b, 0
            self.state.temperature[slot] = temperature(setting, step + b + 1)

    def sample(self, logits, settings=SMALL):
        """What `sample` writes into outputs full of nonsense."""
        rows = logits.shape[0]
        out = {name: torch.full((rows,), -7, dtype=torch.int32, device=DEVICE) for name in ("draw", "argmax")}
        out |= {name: torch.full((rows,), math.nan, device=DEVICE) for name in ("entropy", "confidence", "log_norm")}
        sampling.sample(logits, self.state, self.lanes, CAP, settings=settings, **out)
        return out

    def probabilities(self, logits, sampled, target, settings=SMALL):
        sampling.probabilities(logits, sampled["log_norm"], self.state, self.lanes, CAP, out=target, settings=settings)

    def scaled(self, logits):
        """The reference's input: soft-capped logits over each slot's temperature, [W, C, V]."""
        capped = torch.tanh(logits.float() / CAP) * CAP
        return capped.view(len(self.lanes), -1, logits.shape[1]) / self.state.temperature[self.lanes][:, None, None]

    def counters(self):
        """Seed, canvas and number of the pass of every lane."""
        s = self.state
        return [(s.seed[b : b + 1], int(s.canvas_index[b]), int(s.step[b]) + 1) for b in self.lanes.tolist()]

    def reference(self, logits):
        """counter_statistics lane by lane, flattened."""
        parts = [counter_statistics(x[None], *at) for x, at in zip(self.scaled(logits), self.counters(), strict=True)]
        names = ("draw", "argmax", "entropy", "confidence")
        return Statistics(*(torch.cat([getattr(part, name)[0] for part in parts]) for name in names))

    def check(self, logits, out, atol=1e-4):
        """argmax exact; the draw may only differ where two scores are as close as their rounding."""
        expected, x = self.reference(logits), self.scaled(logits)
        assert torch.equal(out["argmax"].long(), logits.float().argmax(-1))
        torch.testing.assert_close(out["entropy"], expected.entropy.clamp(min=0), atol=atol, rtol=1e-4)
        torch.testing.assert_close(out["confidence"], expected.confidence, atol=atol, rtol=1e-4)
        torch.testing.assert_close(out["log_norm"], x.flatten(0, 1).logsumexp(-1), atol=1e-4, rtol=1e-5)
        count, same = x.shape[1], out["draw"].long() == expected.draw
        for row in (~same).nonzero().flatten().tolist():
            seed, canvas, step = self.counters()[row // count]
            noise = exponential_noise(seed, *x.shape[1:], canvas, step)
            score = x[row // count, row % count] - noise[0, row % count].log()
            assert score[out["draw"][row].long()] > score.max() - 1e-3, f"row {row}: a clearly smaller score was drawn"
        return same.float().mean()


@pytest.mark.parametrize("vocab", [64, 256, 300, 1])
@pytest.mark.parametrize("spread", [0.1, 4.0, 40.0])
def test_sample_against_reference(vocab, spread):
    settings = (DecodeSettings(), DecodeSettings(max_denoising_steps=7, t_min=0.5, t_max=1.3))
    lanes, logits = Pass(*settings, step=3, canvas=2), gaussian(4, vocab, scale=spread)
    assert lanes.check(logits, lanes.sample(logits)) == 1


@pytest.mark.parametrize("t", [0.4, 0.05, 1e-3])
def test_sample_at_small_temperatures(t):
    """Below T = cap * log2(e) / 108.5 = 0.3989 the kernel looks for the maximum first: exp(30 / T) would overflow.

    The scaled logits reach 30 / T, so that fp32 knows the entropy's terms to about 30 / T * 2^-22.
    """
    lanes, logits = Pass(DecodeSettings(t_min=t, t_max=t)), gaussian(3, 200, scale=20)
    logits[0] = -20.0
    logits[1, 7:9] = 40.0
    assert lanes.check(logits, lanes.sample(logits), atol=max(1e-4, 30 / t * 2**-20)) == 1


def test_sample_extremes():
    """-inf and huge logits cap at -+30; ties, across tiles and where the cap hides a difference; NaN in one row."""
    lanes, logits = Pass(DecodeSettings()), torch.zeros(7, 200, device=DEVICE).bfloat16()
    logits[:2] = -math.inf
    logits[1, 150] = 0.0
    logits[2, 70], logits[2, 199] = 3e38, math.inf
    logits[3, [60, 64, 130]] = 5.0
    logits[4, 10], logits[4, 20] = 1000.0, 1008.0
    logits[5], logits[6] = -3e38, math.nan
    out, expected = lanes.sample(logits), lanes.reference(logits)
    assert out["argmax"][:6].tolist() == [0, 150, 199, 60, 20, 0]
    assert 0 <= int(out["argmax"][6]) < 200 and 0 <= int(out["draw"][6]) < 200
    torch.testing.assert_close(out["entropy"][:6], expected.entropy[:6].clamp(min=0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out["confidence"][:6], expected.confidence[:6], atol=1e-5, rtol=1e-4)
    assert torch.equal(out["draw"][:6].long(), expected.draw[:6])


def test_a_sure_position_has_no_entropy():
    """One logit far above the rest: entropy below 1e-6, where the difference of two sums near 75 would show 1e-5."""
    logits = torch.full((1, 256), -20.0, device=DEVICE).bfloat16()
    logits[0, 3] = 25.0
    out = Pass(DecodeSettings()).sample(logits)
    assert 0 <= out["entropy"].item() < 1e-5
    assert out["confidence"].item() == 1


def test_done_slots_are_left_alone():
    lanes, logits = Pass(DecodeSettings(), DecodeSettings()), gaussian(4, 100)
    lanes.state.done[lanes.lanes[0]] = 1
    out = lanes.sample(logits)
    assert out["draw"][:2].tolist() == [-7] * 2
    assert out["entropy"][:2].isnan().all() and out["entropy"][2:].isfinite().all()
    lanes.probabilities(logits, out, logits)
    assert (logits[:2] == 0).all()
    torch.testing.assert_close(logits[2:].float().sum(-1), torch.ones(2, device=DEVICE), atol=1e-2, rtol=0)


def test_the_draw_does_not_depend_on_the_batch():
    warm, logits = DecodeSettings(t_max=1.0), gaussian(4, 200)
    lanes, alone = Pass(DecodeSettings(), warm, step=2), Pass(warm, step=3)
    alone.state.seed[1], alone.state.canvas_index[1] = lanes.state.seed[1], lanes.state.canvas_index[1]
    out = lanes.sample(logits)
    for name, value in alone.sample(logits[2:]).items():
        assert torch.equal(out[name][2:], value), name


@pytest.mark.parametrize("vocab", [64, 300])
@pytest.mark.parametrize("in_place", [False, True])
def test_probabilities_against_reference(vocab, in_place):
    """BF16 rounds to 2^-8 of a value at most; 1e-3 is room for the exponentials' own 2^-22 of logits up to 30 / T."""
    lanes = Pass(DecodeSettings(), DecodeSettings(t_min=0.1, t_max=0.2), step=1)
    logits = gaussian(2, vocab, scale=5)
    expected = lanes.scaled(logits).softmax(-1).flatten(0, 1)
    target = logits if in_place else torch.full_like(logits, math.nan)
    lanes.probabilities(logits, lanes.sample(logits), target)
    torch.testing.assert_close(target.float(), expected, rtol=2**-8 + 1e-3, atol=1e-30)


@pytest.mark.gpu
def test_sampled_draws_follow_the_distribution():
    """Chi-square of 50,000 draws over 8 tokens through the kernel: 99.9 % quantile of 7 degrees of freedom is 24.3."""
    lanes, rows, values = (
        Pass(DecodeSettings(t_min=1.0, t_max=1.0)),
        50_000,
        [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0],
    )
    logits = torch.tensor(values, device=DEVICE).bfloat16().repeat(rows, 1)
    expected = lanes.scaled(logits)[0, 0].softmax(-1) * rows
    observed = torch.bincount(lanes.sample(logits)["draw"].long(), minlength=8)
    assert ((observed - expected) ** 2 / expected).sum() < 24.3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "vocab"), [(1, 262_144), (17, 262_144), (255, 262_144), (257, 262_144), (256, 100_003)]
)
@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_sample_at_real_shapes(rows, vocab, spread):
    lanes, logits = Pass(DecodeSettings(), step=20), gaussian(rows, vocab, scale=spread)
    out, again = (lanes.sample(logits, sampling.SAMPLE) for _ in range(2))
    assert lanes.check(logits, out) > 0.99
    assert all(torch.equal(out[name], again[name]) for name in out)
    expected = lanes.scaled(logits)[0].softmax(-1)
    lanes.probabilities(logits, out, logits, settings=None)
    torch.testing.assert_close(logits.float(), expected, rtol=2**-8 + 1e-3, atol=1e-30)


@pytest.mark.gpu
def test_rows_beyond_two_gigabytes_of_entries():
    """Row 8,200 of 262,144 starts past 2^31 entries."""
    lanes, logits = Pass(DecodeSettings()), torch.zeros(8_256, 262_144, dtype=torch.bfloat16, device=DEVICE)
    logits[-1, 5] = 20.0
    out = lanes.sample(logits, None)
    assert out["argmax"][-1] == 5 and out["argmax"][:-1].max() == 0
    lanes.probabilities(logits, out, logits, settings=None)
    assert logits[-1, 5] == 1
