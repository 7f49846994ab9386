"""The fused passes against the reference network on the same weights."""

import copy

import pytest
import torch

from redraft.network.arena import KVArena, SlotArena
from redraft.network.fused import Buffers, FusedModel
from redraft.network.model import Model
from redraft.network.weights import Weights, iter_tensors
from redraft.quant.load import load_checkpoint
from redraft.store.random import PRESETS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = (9, 61)  # inside the window of 48, and past it
PIECE = 40


def _widened(weights: Weights) -> Weights:
    """A copy whose plain tensors are fp32, for the reference."""
    wide = copy.deepcopy(weights)
    for _, tensor in iter_tensors(wide):
        if tensor.dtype == torch.bfloat16:
            tensor.data = tensor.float()
    return wide


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Median over rows of the relative error: a row whose router flips between two near experts says nothing."""
    return float(((a.double() - b.double()).norm(dim=-1) / b.double().norm(dim=-1)).median())


@pytest.fixture(scope="module", params=["w4", pytest.param("bf16", marks=pytest.mark.gpu)])
def networks(request):
    checkpoint = load_checkpoint("random:tiny", request.param, torch.bfloat16, DEVICE)
    for layer, (encoder, decoder) in zip(checkpoint.weights.layers, ((0.75, 1.25), (1.125, 0.875)), strict=True):
        layer.encoder_scalar.fill_(encoder)
        layer.decoder_scalar.fill_(decoder)
    reference = Model(checkpoint.config, _widened(checkpoint.weights))
    return reference, FusedModel(checkpoint.config, checkpoint.weights, checkpoint.spec)


def _whole(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, PRESETS["tiny"].vocab_size, shape, device=DEVICE)


def _filled(model: FusedModel, prompts: list[torch.Tensor], slots: int) -> tuple[SlotArena, list[torch.Tensor]]:
    """An arena with each prompt encoded into its slot, piece by piece; and every prompt's normed hidden states."""
    arena, hidden = SlotArena.allocate(model.config, slots, 80, PIECE, torch.bfloat16, DEVICE), []
    for index, prompt in enumerate(prompts):
        parts = []
        for piece in prompt.split(PIECE):
            b = Buffers(model, 1, len(piece))
            model.embed(piece, b)
            model.run_layers(b, arena, _whole(index), causal=True)
            model.commit(arena, _whole(index), _whole(len(piece)))
            parts.append(b.next_in.clone())
        hidden.append(torch.cat(parts))
    return arena, hidden


def _denoised(model: FusedModel, arena: SlotArena, canvases: torch.Tensor, *slots: int) -> torch.Tensor:
    """Normed hidden states [lanes, C, H] of a first pass over the canvases of these slots."""
    b = Buffers(model, len(slots), model.config.canvas_length)
    model.embed(canvases.flatten(), b, _whole(*slots))
    model.run_layers(b, arena, _whole(*slots), causal=False)
    return b.next_in.view(len(slots), model.config.canvas_length, -1)


def test_passes_match_the_reference(networks):
    """BF16 activations round at about 20 places a layer, by up to 2^-9 each: two layers stay below 2e-2."""
    reference, fused = networks
    config = reference.config
    torch.manual_seed(0)
    prompts, canvases = [_tokens(n) for n in LENGTHS], _tokens(2, config.canvas_length)
    arena, hidden = _filled(fused, [*prompts, canvases[0]], slots=3)
    assert arena.length.tolist() == [*LENGTHS, config.canvas_length]
    got = _denoised(fused, arena, canvases, 1, 0).flip(0)  # slots not in order, and without the last
    for i, prompt in enumerate(prompts):
        alone = KVArena(config, 1, 80, torch.float32, DEVICE)
        assert _relative(hidden[i], reference.encode(prompt[None], alone)[0]) < 2e-2
        logits = reference.denoise(canvases[i : i + 1], alone)[0]
        assert _relative(reference.head(got[i].float()), logits) < 2e-2


@pytest.mark.gpu
def test_a_commit_lets_the_next_canvas_see_the_last(networks):
    reference, fused = networks
    config, length = reference.config, reference.config.canvas_length
    torch.manual_seed(1)
    prompt, (first, second) = _tokens(LENGTHS[1]), _tokens(2, 1, length)
    arena, _ = _filled(fused, [torch.cat((prompt, first[0]))], slots=1)
    got = _denoised(fused, arena, second, 0)
    alone = KVArena(config, 1, 80, torch.float32, DEVICE)
    reference.encode(prompt[None], alone)
    before = reference.denoise(second, alone)
    reference.encode(first, alone)
    expected = reference.denoise(second, alone)
    assert _relative(before, expected) > 0.1, "the first canvas matters"
    assert _relative(reference.head(got.float()), expected) < 2e-2


@pytest.mark.gpu
def test_slots_do_not_see_each_other(networks):
    """A slot's rows are the same to the bit whatever stands in the other slots."""
    _, fused = networks
    torch.manual_seed(2)
    first, *others = (_tokens(n) for n in (12, 12, 33))
    canvas = _tokens(fused.config.canvas_length)
    outputs = []
    for other in others:
        arena, _ = _filled(fused, [first, other], slots=2)
        outputs.append(_denoised(fused, arena, torch.cat((canvas, canvas)), 0, 1))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert not torch.equal(outputs[0][1], outputs[1][1])
