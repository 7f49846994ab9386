"""What a denoising pass says about each position: argmax, entropy, confidence, and one drawn token.

Two ways to draw. `stock_statistics` uses torch's own generator exactly as transformers does. `counter_statistics` uses
the Gumbel-max trick with counter-based noise: token = argmax(logits - log E), E = -log(1 - u) exponential, u from
Philox keyed by the request's seed and counted by (vocabulary entry, position, pass, canvas), so a draw does not depend
on the batch, on earlier draws or on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from redraft.kernels.philox import philox

# The last counter word is canvas * 2 + purpose, so that a pass's draws and its re-draws never share a number.
DRAW, REDRAW = 0, 1


@dataclass
class Statistics:
    """One denoising pass, per position. All tensors are [B, C]."""

    draw: torch.Tensor  # int64, a token drawn from softmax(logits)
    argmax: torch.Tensor  # int64
    entropy: torch.Tensor  # fp32, nats
    confidence: torch.Tensor  # fp32, the largest probability


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
    return _exponential(words.flatten(-2)[..., :vocab])


def _exponential(words: torch.Tensor) -> torch.Tensor:
    """-log(1 - u) of u = (word + 1/2) / 2^32, by its series where 1 - u would lose u's digits."""
    u = (words.float() + 0.5) * 2.0**-32
    return torch.where(u < 2.0**-12, u + 0.5 * u * u, -torch.log1p(-u))


def random_tokens(seeds: torch.Tensor, length: int, vocab: int, canvas: int, step: int) -> torch.Tensor:
    """Uniform tokens int64 [B, length]: step 0 is the first canvas, step s the re-draw after pass s."""
    device = seeds.device
    zero, counter_step, last = torch.tensor([0, step, canvas * 2 + REDRAW], device=device)
    words = philox(seeds[:, None], zero, torch.arange(length, device=device), counter_step, last)
    # Multiply-shift maps 32 random bits to 0..vocab-1 with a bias below vocab / 2^32.
    return (words[..., 0] * vocab) >> 32
