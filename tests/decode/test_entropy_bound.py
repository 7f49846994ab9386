"""The entropy-bound rule: temperature, acceptance, stopping, and what a finished row keeps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.config import DecodeSettings
from redraft.decode.entropy_bound import EntropyBoundDecoder, StopTest, accept, temperature
from redraft.decode.streams import CounterStream, TorchStream


def test_temperature_falls_linearly():
    rule = DecodeSettings(max_denoising_steps=4, t_min=0.4, t_max=0.8)
    assert [round(float(temperature(rule, step)), 6) for step in (1, 2, 3, 4)] == [0.8, 0.7, 0.6, 0.5]


def test_accept_by_hand():
    entropy = torch.tensor([[0.3, 0.05, 0.06, 0.04]])
    # Ascending 0.04, 0.05, 0.06, 0.3; the sums before each are 0, 0.04, 0.09, 0.15.
    assert accept(entropy, 0.1).tolist() == [[False, True, True, True]]
    assert accept(entropy, 0.03).tolist() == [[False, False, False, True]]
    assert accept(entropy, 0.2).tolist() == [[True, True, True, True]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=20), st.floats(0.01, 5))
def test_accept_always_takes_the_surest_and_never_passes_the_bound(values, bound):
    entropy = torch.tensor([values])
    chosen = accept(entropy, bound)[0]
    assert chosen[entropy[0].argmin()]
    kept = entropy[0][chosen]
    assert float(kept.sum() - kept.max()) <= bound + 1e-4
    assert chosen.all() or entropy[0][~chosen].min() >= kept.max()


@pytest.mark.parametrize("stability", [0, 1, 2])
def test_stop_needs_equal_canvases_and_confidence(stability):
    stop = StopTest(DecodeSettings(stability_threshold=stability, confidence_threshold=0.1))
    canvas, sure, unsure = torch.tensor([[1, 2], [3, 4]]), torch.zeros(2, 2), torch.tensor([[0.0, 0.0], [0.3, 0.3]])
    for _ in range(stability):
        assert stop(canvas, sure).tolist() == [False, False]
    assert stop(canvas, unsure).tolist() == [True, False]
    assert stop(canvas, sure).tolist() == [True, True]
    changed = torch.tensor([[1, 2], [3, 5]])
    assert stop(changed, sure).tolist() == [True, stability == 0]


def _logits(tokens: list[list[int]], sharpness: float) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), 8).float() * sharpness


def test_decoder_freezes_a_finished_row():
    rule = DecodeSettings(max_denoising_steps=10, confidence_threshold=0.01)
    decoder = EntropyBoundDecoder(rule, CounterStream([1, 2], 3, 8, torch.device("cpu")), 0)
    sure = _logits([[1, 2, 3], [4, 5, 6]], 30.0)
    decoder.step(sure)
    # Row 0 repeats its canvas, row 1 changes its mind.
    assert decoder.step(_logits([[1, 2, 3], [4, 5, 7]], 30.0)).done.tolist() == [True, False]
    frozen = decoder.self_conditioning[0].clone()
    outcome = decoder.step(_logits([[7, 7, 7], [4, 5, 7]], 30.0))
    assert outcome.argmax.tolist() == [[1, 2, 3], [4, 5, 7]]
    assert decoder.canvas.tolist() == [[1, 2, 3], [4, 5, 7]]
    assert torch.equal(decoder.self_conditioning[0], frozen)
    assert outcome.done.tolist() == [True, True]
    assert decoder.finished()


def test_decoder_redraws_what_it_does_not_accept():
    rule = DecodeSettings(entropy_bound=1e-6, max_denoising_steps=5)
    decoder = EntropyBoundDecoder(rule, CounterStream([3], 64, 8, torch.device("cpu")), 0)
    logits = torch.zeros(1, 64, 8)
    logits[0, 5, 2] = 30.0
    outcome = decoder.step(logits)
    # The surest position costs nothing, so the next one is within the bound too; a third would not be.
    assert outcome.accepted[0, 5]
    assert outcome.accepted.sum() == 2
    assert decoder.canvas[0, 5] == 2
    assert len(decoder.canvas[~outcome.accepted].unique()) == 8, "62 uniform draws of 8 tokens"


def test_decoder_stops_at_its_last_step():
    decoder = EntropyBoundDecoder(
        DecodeSettings(max_denoising_steps=2), TorchStream(0, 1, 3, 8, torch.device("cpu")), 0
    )
    for _ in range(2):
        assert not decoder.finished()
        decoder.step(torch.randn(1, 3, 8))
    assert decoder.finished()
    assert decoder.done.tolist() == [False]


def test_torch_stream_draws_in_transformers_order():
    stream = TorchStream(9, 2, 4, 8, torch.device("cpu"))
    logits = torch.randn(2, 4, 8)
    got = (stream.tokens(0, 0), stream.statistics(logits, 0, 1).draw, stream.tokens(0, 1))
    torch.manual_seed(9)
    first = torch.randint(0, 8, (2, 4))
    draw = torch.multinomial(logits.softmax(-1).view(-1, 8), 1).view(2, 4)
    assert all(torch.equal(a, b) for a, b in zip(got, (first, draw, torch.randint(0, 8, (2, 4))), strict=True))
