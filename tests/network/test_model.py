"""Each pass against transformers' module, and the packed network against its own dequantised weights."""

import inspect

import pytest
import torch
from tiny import CANVAS, VOCAB, WINDOW, tiny_model
from transformers import DynamicCache

from redraft.config import QuantSpec
from redraft.kernels.packing import dequantize
from redraft.network.arena import KVArena
from redraft.network.model import Model
from redraft.quant.load import load_checkpoint

TOLERANCE = {"rtol": 0, "atol": 1e-4}
PROMPT = 25  # longer than the window of 10


@pytest.fixture(scope="module")
def model(tiny_dir) -> Model:
    checkpoint = load_checkpoint(tiny_dir, "bf16", torch.float32)
    return Model(checkpoint.config, checkpoint.weights)


def _arena(model: Model, padding: list[int]) -> KVArena:
    capacity = PROMPT + 2 * CANVAS
    return KVArena(model.config, len(padding), capacity, torch.float32, torch.device("cpu"), torch.tensor(padding))


class _Reference:
    """transformers' encoder and decoder on one growing cache, with left padding."""

    def __init__(self, hf, padding: list[int]):
        self.hf, self.padding = hf, padding
        self.cache = DynamicCache(config=hf.config.get_text_config(decoder=True))
        self.mask = torch.ones(len(padding), 0, dtype=torch.bool)
        # The keyword was renamed from past_key_values to cache.
        self.key = "cache" if "cache" in inspect.signature(hf.model.decoder.forward).parameters else "past_key_values"

    @torch.no_grad()
    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        start = self.mask.shape[1]
        self.mask = torch.nn.functional.pad(self.mask, (0, tokens.shape[1]), value=True)
        for row, count in enumerate(self.padding):
            self.mask[row, :count] = False
        shared = {"position_ids": torch.arange(start, self.mask.shape[1])[None], self.key: self.cache}
        masks = self.hf.model.encoder.create_masks_for_generate(
            config=self.hf.config, inputs_embeds=torch.empty(*tokens.shape, 0), attention_mask=self.mask, **shared
        )
        return self.hf.model.encoder(input_ids=tokens, attention_mask=masks, **shared).last_hidden_state

    @torch.no_grad()
    def denoise(self, canvas: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        length = self.mask.shape[1]
        return self.hf(
            decoder_input_ids=canvas,
            self_conditioning_logits=conditioning,
            decoder_attention_mask=torch.nn.functional.pad(self.mask, (0, CANVAS), value=True),
            decoder_position_ids=torch.arange(length, length + CANVAS)[None],
            **{self.key: self.cache},
        ).logits


@pytest.mark.parametrize("padding", [[0, 0], [7, 0], [WINDOW + 5, 3]])
def test_passes_match_transformers(model, tiny_hf, padding):
    torch.manual_seed(len(padding) + padding[0])
    arena, reference = _arena(model, padding), _Reference(tiny_hf, padding)
    for count in (PROMPT, CANVAS):
        tokens = torch.randint(3, VOCAB, (2, count))
        hidden, expected = model.encode(tokens, arena), reference.encode(tokens)
        for row, pad in enumerate(padding):
            first = pad if count == PROMPT else 0
            torch.testing.assert_close(hidden[row, first:], expected[row, first:], **TOLERANCE)
        canvas, conditioning = torch.randint(0, VOCAB, (2, CANVAS)), torch.randn(2, CANVAS, VOCAB) * 3
        for signal in (None, conditioning):
            logits = model.denoise(canvas, arena, signal)
            assert logits.std() > 0.1, "a flat head would agree with anything"
            torch.testing.assert_close(logits, reference.denoise(canvas, signal), **TOLERANCE)


def test_denoise_leaves_the_arena_alone(model):
    arena = _arena(model, [0])
    model.encode(torch.randint(3, VOCAB, (1, PROMPT)), arena)
    before = [(c.keys.clone(), c.values.clone(), c.rows) for c in arena.layers]
    model.denoise(torch.randint(0, VOCAB, (1, CANVAS)), arena)
    assert arena.length == PROMPT
    for cache, (keys, values, rows) in zip(arena.layers, before, strict=True):
        assert cache.rows == rows
        assert torch.equal(cache.keys[:, :, :rows], keys[:, :, :rows])
        assert torch.equal(cache.values[:, :, :rows], values[:, :, :rows])


def test_encoding_in_pieces_equals_encoding_at_once(model):
    tokens = torch.randint(3, VOCAB, (1, PROMPT))
    whole, pieces = _arena(model, [0]), _arena(model, [0])
    expected = model.encode(tokens, whole)
    got = torch.cat([model.encode(part, pieces) for part in tokens.split([1, 11, 3, 10], dim=1)], dim=1)
    torch.testing.assert_close(got, expected, **TOLERANCE)
    canvas = torch.randint(0, VOCAB, (1, CANVAS))
    torch.testing.assert_close(model.denoise(canvas, pieces), model.denoise(canvas, whole), **TOLERANCE)


def test_packed_network_equals_transformers_with_dequantised_weights(tiny_dir):
    checkpoint = load_checkpoint(tiny_dir, "w4", torch.float32, spec=QuantSpec(16, 8))
    model, hf = Model(checkpoint.config, checkpoint.weights), tiny_model()
    original = hf.model.decoder.layers[0].experts.gate_up_proj.clone()
    with torch.no_grad():
        for layer, weights in zip(hf.model.decoder.layers, checkpoint.weights.layers, strict=True):
            packed = weights.experts
            layer.experts.gate_up_proj.copy_(dequantize(packed.gu_q, packed.gu_s, packed.gu_z))
            layer.experts.down_proj.copy_(dequantize(packed.dn_q, packed.dn_s, packed.dn_z))
    assert not torch.allclose(original, hf.model.decoder.layers[0].experts.gate_up_proj, atol=1e-3)
    arena, reference = _arena(model, [0]), _Reference(hf, [0])
    tokens, canvas = torch.randint(3, VOCAB, (1, PROMPT)), torch.randint(0, VOCAB, (1, CANVAS))
    torch.testing.assert_close(model.encode(tokens, arena), reference.encode(tokens), rtol=0, atol=1e-3)
    torch.testing.assert_close(model.denoise(canvas, arena), reference.denoise(canvas, None), rtol=0, atol=1e-3)
