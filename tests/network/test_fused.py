"""The fused passes against the reference network on the same weights."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from redraft.network.arena import KVArena, SlotArena
from redraft.network.fused import Buffers, FusedModel
from redraft.network.model import Model
from redraft.network.weights import DenseExperts, LayerWeights, PackedExperts, SelfConditioningWeights, Weights
from redraft.quant.load import load_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = (9, 61)  # inside the window of 48, and past it
PIECE = 40


def _widened(weights: Weights) -> Weights:
    """A copy whose plain tensors are fp32, for the reference."""

    def wide(node):
        if isinstance(node, torch.Tensor):
            return node.float() if node.dtype == torch.bfloat16 else node.clone()
        if isinstance(node, PackedExperts | DenseExperts | LayerWeights | SelfConditioningWeights | Weights):
            return replace(node, **{f.name: wide(getattr(node, f.name)) for f in fields(node)})
        return [wide(item) for item in node] if isinstance(node, list) else node

    return wide(weights)


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


def _fill(model: FusedModel, arena: SlotArena, prompts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Encode each prompt into its slot, piece by piece; returns the normed hidden states of every prompt."""
    hidden = []
    for index, prompt in enumerate(prompts):
        slot, parts = torch.tensor([index], dtype=torch.int32, device=DEVICE), []
        for piece in prompt.split(PIECE):
            b = Buffers(model, 1, len(piece))
            model.embed(piece, b)
            model.run_layers(b, arena, slot, causal=True)
            model.commit(arena, slot, torch.tensor([len(piece)], dtype=torch.int32, device=DEVICE))
            parts.append(b.next_in.clone())
        hidden.append(torch.cat(parts))
    return hidden


def test_passes_match_the_reference(networks):
    """BF16 activations round at about 20 places a layer, by up to 2^-9 each: two layers stay below 2e-2."""
    reference, fused = networks
    config = reference.config
    torch.manual_seed(0)
    prompts = [torch.randint(0, config.vocab_size, (n,), device=DEVICE) for n in LENGTHS]
    canvases = torch.randint(0, config.vocab_size, (2, config.canvas_length), device=DEVICE)
    arena = SlotArena.allocate(config, 3, 80, PIECE, torch.bfloat16, DEVICE)
    hidden = _fill(fused, arena, [*prompts, canvases[0]])
    assert arena.length.tolist() == [*LENGTHS, config.canvas_length]
    slots = torch.tensor([1, 0], dtype=torch.int32, device=DEVICE)  # not in order, and without the last
    b = Buffers(fused, 2, config.canvas_length)
    fused.embed(canvases.flatten(), b, slots)
    fused.run_layers(b, arena, slots, causal=False)
    got = b.next_in.view(2, config.canvas_length, -1).flip(0)
    for i, prompt in enumerate(prompts):
        alone = KVArena(config, 1, 80, torch.float32, DEVICE)
        expected = reference.encode(prompt[None], alone)
        assert _relative(hidden[i], expected[0]) < 2e-2
        logits = reference.denoise(canvases[i : i + 1], alone)[0]
        assert _relative(reference.head(got[i].float()), logits) < 2e-2


@pytest.mark.gpu
def test_a_commit_lets_the_next_canvas_see_the_last(networks):
    reference, fused = networks
    config, length = reference.config, reference.config.canvas_length
    torch.manual_seed(1)
    prompt = torch.randint(0, config.vocab_size, (LENGTHS[1],), device=DEVICE)
    first, second = torch.randint(0, config.vocab_size, (2, 1, length), device=DEVICE)
    arena = SlotArena.allocate(config, 1, 80, PIECE, torch.bfloat16, DEVICE)
    _fill(fused, arena, [torch.cat((prompt, first[0]))])
    b, slot = Buffers(fused, 1, length), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    fused.embed(second[0], b, slot)
    fused.run_layers(b, arena, slot, causal=False)
    alone = KVArena(config, 1, 80, torch.float32, DEVICE)
    reference.encode(prompt[None], alone)
    before = reference.denoise(second, alone)
    reference.encode(first, alone)
    expected = reference.denoise(second, alone)
    assert _relative(before, expected) > 0.1, "the first canvas matters"
    assert _relative(reference.head(b.next_in.float())[None], expected) < 2e-2


@pytest.mark.gpu
def test_slots_do_not_see_each_other(networks):
    """A slot's rows are the same to the bit whatever stands in the other slots."""
    _, fused = networks
    config = fused.config
    torch.manual_seed(2)
    prompts = [torch.randint(0, config.vocab_size, (n,), device=DEVICE) for n in (12, 12, 33)]
    canvas = torch.randint(0, config.vocab_size, (config.canvas_length,), device=DEVICE)
    outputs = []
    for other in (prompts[1], prompts[2]):
        arena = SlotArena.allocate(config, 2, 80, PIECE, torch.bfloat16, DEVICE)
        _fill(fused, arena, [prompts[0], other])
        b = Buffers(fused, 2, config.canvas_length)
        slots = torch.arange(2, dtype=torch.int32, device=DEVICE)
        fused.embed(torch.cat((canvas, canvas)), b, slots)
        fused.run_layers(b, arena, slots, causal=False)
        outputs.append(b.next_in.view(2, config.canvas_length, -1).clone())
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert not torch.equal(outputs[0][1], outputs[1][1])
