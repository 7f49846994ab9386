"""The end of a pass on the device against the rule's torch form, pass for pass, lanes in any order."""

import pytest
import torch
from tolerance import DEVICE

from redraft.config import DecodeSettings
from redraft.decode import entropy_bound
from redraft.decode.entropy_bound import ENTROPY_BOUND
from redraft.kernels.sampling import Statistics, counter_statistics, random_tokens
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


class Side:
    """Slots of one implementation. `settings` are of slots 0, 1, ...; one further slot stays empty."""

    def __init__(self, settings, length, vocab, canvas=0):
        self.length, self.vocab, count = length, vocab, len(settings) + 1
        self.state, self.canvases = SlotState.allocate(count, DEVICE), Canvases.allocate(count, length, DEVICE)
        self.own = ENTROPY_BOUND.allocate(count, length, vocab, DEVICE)
        for b, setting in enumerate(settings):
            self.state.admit(b, SEEDS[b])
            self.state.canvas_index[b] = canvas + b - 1
            ENTROPY_BOUND.configure(self.own, b, setting)
        for tensor in (self.canvases.tokens, self.canvases.argmax, self.canvases.accepted, self.canvases.status):
            tensor.fill_(-9)

    def start(self, slots, tokens=None):
        ENTROPY_BOUND.start(slots, self.state, self.own, self.canvases, tokens)

    def step(self, stats, slots):
        ENTROPY_BOUND.step(stats, slots, self.state, self.own, self.canvases)

    def uniform(self, slots, step):
        """The counter-based tokens of these slots [W, C]."""
        at = zip(self.state.seed[slots].split(1), self.state.canvas_index[slots].tolist(), strict=True)
        return torch.cat([random_tokens(seed, self.length, self.vocab, canvas, step) for seed, canvas in at])

    def tensors(self):
        parts = {**vars(self.state), **vars(self.canvases), **vars(self.own)}
        return {name: value for name, value in parts.items() if isinstance(value, torch.Tensor)}


def assert_equal(ours, reference):
    for (name, mine), other in zip(ours.tensors().items(), reference.tensors().values(), strict=True):
        assert torch.equal(mine.nan_to_num(7.5), other.nan_to_num(7.5)), name


def table(*slots):
    return torch.tensor(slots, dtype=torch.int32, device=DEVICE)


def run(settings, logits_of, length, vocab, canvas=0):
    """Drive both sides to the end and compare everything after every pass. logits_of(b, step) -> [1, C, V]."""
    ours, reference = (Side(settings, length, vocab, canvas) for _ in range(2))
    lanes = table(*reversed(range(len(settings))))
    ours.start(lanes)
    reference.state.canvas_index[lanes] += 1
    first = reference.uniform(lanes, 0)
    reference.state.canvas_index[lanes] -= 1
    reference.start(lanes, first)
    assert_equal(ours, reference)
    for _ in range(max(s.max_denoising_steps for s in settings) + 2):
        rows = []
        for b in lanes.tolist():
            step, index = int(reference.state.step[b]) + 1, int(reference.state.canvas_index[b])
            if reference.state.done[b]:  # a done slot must not read its rows
                none = torch.full((1, length), -1, device=DEVICE)
                rows.append((none, none, torch.full((1, length), float("nan"), device=DEVICE), none))
                continue
            scaled = logits_of(b, step) / reference.state.temperature[b]
            stats = counter_statistics(scaled, reference.state.seed[b : b + 1], index, step)
            rows.append((stats.draw, stats.argmax, stats.entropy, reference.uniform(table(b), step)))
        draw, argmax, entropy, redraw = (torch.cat(part) for part in zip(*rows, strict=True))
        ours.step(Statistics(draw.int(), argmax.int(), entropy, entropy), lanes)
        reference.step(Statistics(draw, argmax, entropy, entropy, redraw), lanes)
        assert_equal(ours, reference)
    assert (ours.state.done != 0).all()
    return ours.state


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
        assert slots.step.tolist()[:-1] == [1 + stability, 3 + stability, 6 + stability]


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

    def logits(b, step):
        canvas = torch.full((1, length), [0, 1, 0, 0, 0][step - 1], device=DEVICE)
        return 40.0 * torch.nn.functional.one_hot(canvas, vocab)

    slots = run([DecodeSettings(max_denoising_steps=5)], logits, length, vocab)
    assert slots.step.tolist()[:-1] == [4]
    assert slots.done.tolist() == [CONVERGED, OUT_OF_STEPS]


@pytest.mark.parametrize("length", [1, 17, 255, 256, 257])
def test_acceptance_alone(length):
    """Ties, zeros, infinities and NaN among random entropies, at several bounds."""
    entropy = torch.rand(3, length, device=DEVICE) * 0.05
    entropy[1] = (entropy[1] * 100).round() / 100
    entropy[2, ::3] = 0.0
    if length > 4:
        entropy[2, 1], entropy[2, 4] = float("inf"), float("nan")
    settings = [DecodeSettings(entropy_bound=bound) for bound in (0.01, 0.3, 0.1)]
    side, lanes = Side(settings, length, 50), table(0, 1, 2)
    side.start(lanes)
    draw = torch.arange(3 * length, device=DEVICE, dtype=torch.int32).view(3, length) + 100
    side.step(Statistics(draw, draw, entropy, entropy), lanes)
    expected = torch.cat([accept(entropy[b : b + 1], s.entropy_bound) for b, s in enumerate(settings)])
    accepted, tokens = (rows.view(-1, length)[:3] for rows in (side.canvases.accepted, side.canvases.tokens))
    assert torch.equal(accepted.bool(), expected)
    assert torch.equal(tokens, torch.where(expected, draw.long(), side.uniform(lanes, 1)))


def test_start_canvas_touches_only_the_selected():
    length, vocab = 17, 262_144
    side = Side([DecodeSettings()] * 3, length, vocab, canvas=8)
    side.state.done[0] = 0
    side.state.step.fill_(5)
    before = side.canvases.tokens.clone()
    side.start(table(1))
    expected = random_tokens(side.state.seed[1:2], length, vocab, 9, 0)[0]
    for rows in (side.canvases.tokens, side.canvases.argmax):
        assert torch.equal(rows[length : 2 * length], expected)
    assert side.state.step.tolist() == [5, 0, 5, 5]
    assert side.state.done.tolist() == [0, 0, OUT_OF_STEPS, OUT_OF_STEPS]
    assert side.canvases.status.tolist() == [[-9] * 4, [0, 0, 0, 9], [-9] * 4, [-9] * 4]
    for rows in (slice(0, length), slice(2 * length, None)):
        assert torch.equal(side.canvases.tokens[rows], before[rows])


def test_a_new_canvas_forgets_the_last():
    """The second canvas starts with the argmax the first ended on; that is not stability."""
    length, lanes = 3, table(0)
    side = Side([DecodeSettings(max_denoising_steps=5)], length, 5)
    token, sure = torch.full((1, length), 2, device=DEVICE), torch.zeros(1, length, device=DEVICE)
    for canvas in range(2):
        side.start(lanes)
        assert int(side.state.canvas_index[0]) == canvas
        side.canvases.argmax.fill_(2)
        side.step(Statistics(token, token, sure, sure), lanes)
        assert side.state.done.tolist() == [0, OUT_OF_STEPS]
        side.step(Statistics(token, token, sure, sure), lanes)
        assert side.state.done.tolist() == [CONVERGED, OUT_OF_STEPS]


@pytest.mark.gpu
def test_real_canvas_for_all_steps():
    settings = [DecodeSettings(), DecodeSettings(stability_threshold=2, entropy_bound=2.0), DecodeSettings(t_max=1.0)]
    run(settings, settling(256, 300, 0, calm=[5, 20, 47]), 256, 300)
