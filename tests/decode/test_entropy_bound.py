"""The entropy-bound rule: temperature, acceptance, stopping, and what a finished row keeps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CANVAS, VOCAB

import redraft
from redraft.config import DecodeSettings
from redraft.decode.entropy_bound import ENTROPY_BOUND, accept
from redraft.decode.rule import find_rule
from redraft.decode.streams import CounterStream, TorchStream
from redraft.engine.eager import Rows
from redraft.errors import UsageError
from redraft.kernels.state import CONVERGED, OUT_OF_STEPS
from redraft.network.arena import KVArena

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tiny_dir):
    return redraft.load(tiny_dir, weights="bf16", device="cpu").model


def _counters(*seeds: int) -> CounterStream:
    return CounterStream([*seeds], CANVAS, VOCAB, CPU)


def _rows(model, rule: DecodeSettings, stream: CounterStream | TorchStream, count: int = 1) -> Rows:
    """Rows of a first canvas, whose logits the test gives."""
    rows = Rows(model, ENTROPY_BOUND, rule, stream, KVArena(model.config, count, CANVAS, model.dtype, CPU))
    rows.start()
    return rows


def _logits(*tokens: int, sharpness: float = 30.0) -> torch.Tensor:
    """Logits [B, C, V] that are sure of one token a row, everywhere."""
    return torch.nn.functional.one_hot(torch.tensor(tokens)[:, None].expand(-1, CANVAS), VOCAB).float() * sharpness


def test_temperature_falls_linearly(model):
    rule = DecodeSettings(max_denoising_steps=4, t_min=0.4, t_max=0.8, confidence_threshold=1e-9)
    rows, seen = _rows(model, rule, _counters(1)), []
    for _ in range(4):
        seen.append(round(float(rows.state.temperature[0]), 6))
        rows.take(torch.randn(1, CANVAS, VOCAB))
    assert seen == [0.8, 0.7, 0.6, 0.5]


def test_rules_are_found_by_name():
    assert find_rule("entropy-bound") is ENTROPY_BOUND
    with pytest.raises(UsageError, match="rule is 'greedy', expected one of entropy-bound"):
        find_rule("greedy")


def test_accept_by_hand():
    entropy = torch.tensor([[0.3, 0.05, 0.06, 0.04]])
    # Ascending 0.04, 0.05, 0.06, 0.3; the sums before each are 0, 0.04, 0.09, 0.15.
    chosen = [accept(entropy, bound).int().tolist() for bound in (0.1, 0.03, 0.2)]
    assert chosen == [[[0, 1, 1, 1]], [[0, 0, 0, 1]], [[1, 1, 1, 1]]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=20), st.floats(0.01, 5))
def test_accept_always_takes_the_surest_and_never_passes_the_bound(values, bound):
    entropy = torch.tensor(values)
    chosen = accept(entropy[None], bound)[0]
    assert chosen[entropy.argmin()]
    kept = entropy[chosen]
    assert float(kept.sum() - kept.max()) <= bound + 1e-4
    assert chosen.all() or entropy[~chosen].min() >= kept.max()


@pytest.mark.parametrize("stability", [0, 1, 2])
def test_stop_needs_equal_canvases_and_confidence(model, stability):
    rule = DecodeSettings(stability_threshold=stability, confidence_threshold=0.1)
    rows, half = _rows(model, rule, _counters(1, 2), 2), _logits(5, 6)
    half[1] /= 10.0
    for _ in range(stability):
        rows.take(_logits(5, 6))
        assert rows.state.done.tolist() == [0, 0]
    rows.take(half)
    assert rows.state.done.tolist() == [CONVERGED, 0]
    for repeated in range(stability + 1):
        rows.take(_logits(5, 7))
        assert rows.state.done.tolist() == [CONVERGED, CONVERGED if repeated == stability else 0]


def test_a_finished_row_keeps_everything(model):
    rule = DecodeSettings(max_denoising_steps=10, confidence_threshold=0.01)
    rows = _rows(model, rule, _counters(1, 2), 2)
    rows.take(_logits(1, 4))
    rows.take(_logits(1, 5))  # row 0 repeats its canvas, row 1 changes its mind
    assert rows.running() == [1]
    frozen = rows.self_conditioning[0].clone()
    rows.take(_logits(7, 5))
    assert rows.canvases.argmax.view(-1, CANVAS)[:, 0].tolist() == rows.canvas[:, 0].tolist() == [1, 5]
    assert torch.equal(rows.self_conditioning[0], frozen)
    assert rows.canvases.status[:, :2].tolist() == [[CONVERGED, 2], [CONVERGED, 3]]


def test_what_is_not_accepted_is_redrawn(model):
    rule = DecodeSettings(entropy_bound=1e-6, max_denoising_steps=5)
    rows, logits = _rows(model, rule, _counters(3)), torch.zeros(1, CANVAS, VOCAB)
    logits[0, 5, 2] = 30.0
    rows.take(logits)
    # The surest position costs nothing, so the next one is within the bound too; a third would not be.
    accepted = rows.canvases.accepted.bool()
    assert accepted[5] and accepted.sum() == 2 and rows.canvas[0, 5] == 2
    drawn = _counters(3).tokens(0, 1)[0]
    assert torch.equal(rows.canvas[0][~accepted], drawn[~accepted])


def test_a_canvas_ends_with_its_last_step(model):
    rows = _rows(model, DecodeSettings(max_denoising_steps=2), TorchStream(0, 1, CANVAS, VOCAB, CPU))
    for _ in range(2):
        assert rows.running() == [0]
        rows.take(torch.randn(1, CANVAS, VOCAB))
    assert rows.running() == [] and rows.state.done.tolist() == [OUT_OF_STEPS]


def test_torch_stream_draws_in_transformers_order():
    stream, logits = TorchStream(9, 2, 4, 8, CPU), torch.randn(2, 4, 8)
    got = (stream.tokens(0, 0), stream.statistics(logits, 0, 1).draw, stream.tokens(0, 1))
    torch.manual_seed(9)
    first = torch.randint(0, 8, (2, 4))
    draw = torch.multinomial(logits.softmax(-1).view(-1, 8), 1).view(2, 4)
    assert all(torch.equal(a, b) for a, b in zip(got, (first, draw, torch.randint(0, 8, (2, 4))), strict=True))
