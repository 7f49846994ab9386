"""The end of a pass on the device against decode/entropy_bound.py, pass for pass."""

from __future__ import annotations

import pytest
import torch
from tolerance import DEVICE

from redraft.config import DecodeSettings
from redraft.decode import entropy_bound
from redraft.decode.entropy_bound import EntropyBoundDecoder, temperature
from redraft.decode.streams import CounterStream
from redraft.kernels.acceptance import finish_pass, start_canvas
from redraft.kernels.sampling import counter_statistics, random_tokens
from redraft.kernels.state import CONVERGED, OUT_OF_STEPS, Canvases, SlotState

SEEDS = (3, -(2**40) - 1, 11)


def accept(entropy, bound):
    """entropy_bound.accept with what torch leaves open settled: the order of equal entropies and of the sum."""
    ordered, index = torch.sort(entropy, dim=-1, stable=True)
    chosen = torch.cumsum(ordered.double(), dim=-1).float() - ordered <= bound
    return torch.zeros_like(chosen).scatter(-1, index, chosen)


@pytest.fixture(autouse=True)
def stable_order(monkeypatch):
    monkeypatch.setattr(entropy_bound, "accept", accept)


def make(settings, length, seeds=SEEDS, canvas=0):
    slots, canvases = SlotState.allocate(len(settings), DEVICE), Canvases.allocate(len(settings), length, DEVICE)
    for b, setting in enumerate(settings):
        slots.configure(b, setting, seeds[b], canvas_index=canvas + b)
    for tensor in (canvases.tokens, canvases.argmax, canvases.accepted, canvases.equal, canvases.status):
        tensor.fill_(-9)
    return slots, canvases


def everything(batch):
    return torch.ones(batch, dtype=torch.int32, device=DEVICE)


def run(settings, logits_of, length, vocab, canvas=0):
    """Drive both sides to the end and compare everything after every pass. logits_of(b, step) -> [1, C, V]."""
    batch = len(settings)
    slots, canvases = make(settings, length, canvas=canvas)
    start_canvas(everything(batch), slots, canvases, length, vocab)
    decoders = [
        EntropyBoundDecoder(s, CounterStream([SEEDS[b]], length, vocab, DEVICE), canvas + b)
        for b, s in enumerate(settings)
    ]
    draw, argmax = (torch.full((batch * length,), -9, dtype=torch.int32, device=DEVICE) for _ in range(2))
    entropy = torch.full((batch * length,), float("nan"), device=DEVICE)
    passes = [None] * batch
    for _ in range(max(s.max_denoising_steps for s in settings) + 2):
        for b, decoder in enumerate(decoders):
            rows = slice(b * length, (b + 1) * length)
            if decoder.finished():
                draw[rows], argmax[rows], entropy[rows] = -1, -1, float("nan")  # a done slot must not read them
                continue
            step = decoder.steps + 1
            logits = logits_of(b, step)
            scaled = logits / temperature(settings[b], step).to(DEVICE)
            stats = counter_statistics(scaled, slots.seed[b : b + 1], canvas + b, step)
            draw[rows], argmax[rows], entropy[rows] = stats.draw[0].int(), stats.argmax[0].int(), stats.entropy[0]
            passes[b] = decoder.step(logits)
        finish_pass(draw, argmax, entropy, slots, canvases, length, vocab)
        for b, (decoder, outcome) in enumerate(zip(decoders, passes, strict=True)):
            rows = slice(b * length, (b + 1) * length)
            assert torch.equal(canvases.tokens[rows], decoder.canvas[0])
            assert torch.equal(canvases.argmax[rows], decoder.argmax[0])
            assert torch.equal(canvases.entropy[rows], outcome.entropy[0])
            assert torch.equal(canvases.accepted[rows].bool(), outcome.accepted[0])
            done = CONVERGED * bool(decoder.done) + OUT_OF_STEPS * (decoder.steps == settings[b].max_denoising_steps)
            assert [int(slots.done[b]), int(slots.step[b])] == [done, decoder.steps]
            accepted = int(outcome.accepted.sum())
            assert canvases.status[b].tolist() == [done, decoder.steps, accepted, canvas + b]
    assert (slots.done != 0).all()
    return slots


def settling(length, vocab, seed, calm):
    """Logits that stop changing after `calm[b]` passes and grow surer from pass to pass."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    base = torch.randn(8, len(calm), length, vocab, generator=generator, device=DEVICE)
    return lambda b, step: base[min(step, calm[b]) % 8, b][None] * (1 + 2.0 * step)


@pytest.mark.parametrize("stability", [0, 1, 2, 3])
def test_slots_that_settle_at_different_passes(stability):
    settings = [DecodeSettings(max_denoising_steps=9, stability_threshold=stability, confidence_threshold=0.5)] * 3
    slots = run(settings, settling(5, 7, stability, calm=[1, 3, 6]), 5, 7, canvas=4)
    if stability:
        assert slots.step.tolist() == [1 + stability, 3 + stability, 6 + stability]


@pytest.mark.parametrize("seed", range(4))
def test_different_settings_side_by_side(seed):
    """Bounds from almost nothing to everything; one slot never converges, one has a single step."""
    settings = [
        DecodeSettings(max_denoising_steps=6, entropy_bound=1e-9, confidence_threshold=1e-9),
        DecodeSettings(max_denoising_steps=1, entropy_bound=0.7),
        DecodeSettings(max_denoising_steps=8, entropy_bound=1e6, confidence_threshold=1.0, stability_threshold=2),
    ]
    slots = run(settings, settling(17, 9, seed, calm=[2, 1, 3]), 17, 9)
    assert slots.step.tolist()[:2] == [6, 1]
    assert slots.done.tolist()[:2] == [OUT_OF_STEPS, OUT_OF_STEPS]


def test_the_argmax_may_return_to_an_earlier_canvas():
    """A, B, A, A: two equal canvases in a row only at the end."""
    vocab, length = 5, 3
    canvases = {1: 0, 2: 1, 3: 0, 4: 0, 5: 0}

    def logits(b, step):
        return 40.0 * torch.nn.functional.one_hot(torch.full((1, length), canvases[step], device=DEVICE), vocab)

    slots = run([DecodeSettings(max_denoising_steps=5)], logits, length, vocab)
    assert slots.step.tolist() == [4]
    assert slots.done.tolist() == [CONVERGED]


@pytest.mark.parametrize("length", [1, 17, 255, 256, 257])
def test_acceptance_alone(length):
    """Ties, zeros, infinities and NaN among random entropies, at several bounds."""
    torch.manual_seed(length)
    entropy = torch.rand(3, length, device=DEVICE) * 0.05
    entropy[1] = (entropy[1] * 100).round() / 100
    entropy[2, ::3] = 0.0
    if length > 4:
        entropy[2, 1], entropy[2, 4] = float("inf"), float("nan")
    settings = [DecodeSettings(entropy_bound=bound) for bound in (0.01, 0.3, 0.1)]
    slots, canvases = make(settings, length)
    start_canvas(everything(3), slots, canvases, length, 50)
    draw = torch.arange(3 * length, device=DEVICE, dtype=torch.int32) + 100
    finish_pass(draw, draw, entropy.flatten(), slots, canvases, length, 50)
    expected = torch.cat([accept(entropy[b : b + 1], s.entropy_bound) for b, s in enumerate(settings)])
    accepted = canvases.accepted.view(3, length).bool()
    assert torch.equal(accepted, expected)
    redraw = torch.cat([random_tokens(slots.seed[b : b + 1], length, 50, b, 1) for b in range(3)])
    assert torch.equal(canvases.tokens.view(3, length), torch.where(accepted, draw.view(3, length).long(), redraw))


def test_start_canvas_touches_only_the_selected():
    length, vocab = 17, 262_144
    slots, canvases = make([DecodeSettings()] * 3, length, canvas=7)
    slots.done[0] = 0
    slots.step.fill_(5)
    before = canvases.tokens.clone()
    select = torch.tensor([0, 1, 0], dtype=torch.int32, device=DEVICE)
    start_canvas(select, slots, canvases, length, vocab)
    expected = random_tokens(slots.seed[1:2], length, vocab, 8, 0)[0]
    assert torch.equal(canvases.tokens[length : 2 * length], expected)
    assert torch.equal(canvases.argmax[length : 2 * length], expected)
    assert slots.step.tolist() == [5, 0, 5]
    assert slots.done.tolist() == [0, 0, OUT_OF_STEPS]
    assert canvases.status.tolist() == [[-9] * 4, [0, 0, 0, 8], [-9] * 4]
    for rows in (slice(0, length), slice(2 * length, None)):
        assert torch.equal(canvases.tokens[rows], before[rows])


def test_a_new_canvas_forgets_the_last():
    """The second canvas starts with the argmax the first ended on; that is not stability."""
    length, vocab = 3, 5
    settings = DecodeSettings(max_denoising_steps=5)
    slots, canvases = make([settings], length)
    sure = torch.zeros(length, device=DEVICE)
    token = torch.full((length,), 2, dtype=torch.int32, device=DEVICE)
    for canvas in range(2):
        slots.canvas_index[0] = canvas
        start_canvas(everything(1), slots, canvases, length, vocab)
        canvases.argmax.fill_(2)
        finish_pass(token, token, sure, slots, canvases, length, vocab)
        assert slots.done.tolist() == [0]
        finish_pass(token, token, sure, slots, canvases, length, vocab)
        assert slots.done.tolist() == [CONVERGED]


@pytest.mark.gpu
def test_real_canvas_for_all_steps():
    settings = [DecodeSettings(), DecodeSettings(stability_threshold=2, entropy_bound=2.0), DecodeSettings(t_max=1.0)]
    run(settings, settling(256, 300, 0, calm=[5, 20, 47]), 256, 300)
