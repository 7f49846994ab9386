"""Philox, the counter-based draws, and the per-position statistics."""

from __future__ import annotations

import math

import pytest
import torch

from redraft.kernels.philox import philox
from redraft.kernels.sampling import counter_statistics, exponential_noise, random_tokens, stock_statistics

SEEDS = torch.tensor([1, 2**40 + 3])


@pytest.mark.parametrize(
    ("seed", "counter", "expected"),
    [
        (0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (-1, 0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_known_answers(seed, counter, expected):
    """The known-answer vectors of the authors' Random123 library."""
    word = torch.tensor(counter)
    assert philox(torch.tensor(seed), word, word, word, word).tolist() == list(expected)


def test_philox_counter_words_are_ordered():
    """pi and the golden ratio as counters and key: the third Random123 vector tells the words apart."""
    words = [torch.tensor(w) for w in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    seed = torch.tensor(0x299F31D0 << 32 | 0xA4093822)
    assert philox(seed, *words).tolist() == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


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
    torch.manual_seed(0)
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
