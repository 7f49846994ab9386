"""Tier `turbo` inside transformers, in Triton's interpreter: same logits, right draws, `generate` as before."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import same_bits
import torch
import torch.nn.functional as F
from parity import _Drafts
from same_bits import Run, assert_same_bits, from_pretrained, load, same
from tiny import tiny_model
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.models.diffusion_gemma import generation_diffusion_gemma as generation

import redraft
from redraft.config import QuantSpec
from redraft.hf import layers
from redraft.hf.generation import install
from redraft.hf.layers import obstacle, projections, stacked
from redraft.hf.sampling import FusedSampler
from redraft.kernels.experts_layout import repack
from redraft.kernels.launch import INTERPRET
from redraft.kernels.sampling import counter_statistics
from redraft.store.open import find_checkpoint

SPEC = QuantSpec(16, 8)
SHAPES = {
    "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_attention_heads": 2,
    "num_key_value_heads": 1, "canvas_length": 2,
}  # fmt: skip
PROMPT = torch.tensor([[0, 0, 2, 30], [2, 8, 9, 10]])
PADDING = {"attention_mask": PROMPT != 0}
SETTINGS = {**PADDING, "pad_token_id": 0, "eos_token_id": [1], "max_new_tokens": 2, "max_denoising_steps": 2}


@pytest.fixture(autouse=True)
def _in_the_interpreter(request):
    """Models here are in fp32 on a CPU; on a machine with a GPU its own test runs instead."""
    if not INTERPRET.value and "gpu" not in request.keywords:
        pytest.skip("runs in Triton's interpreter")


@pytest.fixture(scope="module")
def plain():
    """A packed model in tier `bitexact`."""
    model = tiny_model(**SHAPES)
    redraft.accelerate(model, "bitexact", SPEC)
    return model


@pytest.fixture
def turbo(plain):
    model = copy.deepcopy(plain)
    install(model, "turbo")
    return model


def logits(model: Any, conditioned: bool = False) -> torch.Tensor:
    """Of a canvas after an encoded prompt, so both halves of the network count."""
    generator = torch.Generator().manual_seed(3)
    canvas = torch.randint(0, 96, (2, 2), generator=generator)
    before = 3 * torch.randn(2, 2, 96, generator=generator) if conditioned else None
    with torch.no_grad():
        return model(input_ids=PROMPT, **PADDING, decoder_input_ids=canvas, self_conditioning_logits=before).logits


def generate(model: Any, seed: int, **settings: Any) -> Run:
    return same_bits.generate(model, PROMPT, seed, **{**SETTINGS, **settings})


# Layers


def test_logits_are_those_of_the_plain_layers(plain, turbo):
    # fp32 throughout: what differs is the order of sums of 32 numbers, 1e-7 each, over two layers.
    torch.testing.assert_close(logits(turbo, True), logits(plain, True), rtol=0, atol=2e-5)


def test_one_product_makes_queries_keys_and_values(turbo, monkeypatch):
    linear = Mock(side_effect=F.linear)
    monkeypatch.setattr(F, "linear", linear)
    logits(turbo)
    products = [(weight.data_ptr(), weight.shape[0]) for (_, weight, *_), _ in linear.call_args_list]
    for layer, rows in zip(turbo.model.decoder.layers, ((2 + 1 + 1) * 8, (2 + 1) * 16), strict=True):
        first, *others = [linear.weight.data_ptr() for linear in projections(layer.self_attn)]
        assert products.count((first, rows)) == 2  # in the encoder and in the decoder
        assert not set(others) & {pointer for pointer, _ in products}


def test_every_text_norm_is_fused_and_undone(plain, turbo):
    names = {name for name, m in turbo.named_modules() if type(m) is layers.FusedNorm}
    stock = {name for name, m in plain.named_modules() if type(m) is layers.DiffusionGemmaRMSNorm}
    assert stock - names == {"model.encoder.embed_vision.embedding_pre_projection_norm"}
    assert "model.decoder.self_conditioning.post_norm" in names
    install(turbo, "bitexact")
    assert [type(m) for m in turbo.modules()] == [type(m) for m in plain.modules()]
    assert torch.equal(logits(turbo), logits(plain))


def test_packed_experts_in_the_kernels_layout():
    """What a GPU runs: BF16, and a row's experts summed with the norms. Errors are those of BF16 roundings.

    Every row visits every expert: a rounded router would choose others.
    """
    torch.manual_seed(0)
    spec = QuantSpec(64, 32)
    model = tiny_model(**SHAPES, hidden_size=128, moe_intermediate_size=64, num_experts=4, top_k_experts=4)
    redraft.accelerate(model, "off", spec)
    layer = model.model.decoder.layers[0]
    x, delta = torch.randn(3, 128), torch.randn(3, 128)
    attention, layer.self_attn = layer.self_attn, torch.nn.Identity()
    layer.self_attn.forward = lambda **_: (delta[None], None)
    with torch.no_grad():
        expected = layer(x[None])[0]  # transformers' layer after attention, whose output is delta
    layer.self_attn = attention
    model.to(torch.bfloat16)
    layer.experts.repacked = repack(layer.experts.packed(), layer.experts.config, spec)
    out = x.bfloat16()
    layers._feed_forward(layer, out, delta.bfloat16())
    assert float((out.float() - expected).norm() / expected.norm()) < 0.02


def test_joined_weights_are_views_and_memory_does_not_grow(plain, turbo):
    held = [{s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in m.parameters())} for m in (turbo, plain)]
    assert sum(held[0].values()) == sum(held[1].values())
    for decoder, encoder in zip(turbo.model.decoder.layers, turbo.model.encoder.language_model.layers, strict=True):
        mine, other = projections(decoder.self_attn), projections(encoder.self_attn)
        assert all(a.weight is b.weight for a, b in zip(mine, other, strict=True))
        joined = stacked([linear.weight for linear in mine])
        assert torch.equal(joined, torch.cat([linear.weight for linear in mine]))
    with torch.no_grad():
        mine[0].weight[0, 0] = 5.0
    assert joined[0, 0] == 5.0


def test_weights_that_no_longer_follow_each_other_are_multiplied_apart(plain, turbo):
    expected = logits(plain)
    for model in (turbo.to(torch.float64).to(torch.float32), copy.deepcopy(turbo)):
        assert stacked([p.weight for p in projections(model.model.decoder.layers[0].self_attn)]) is None
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=2e-5)


def test_saving_with_joined_weights_loses_nothing(turbo, tmp_path):
    turbo.save_pretrained(tmp_path)
    assert_same_bits(load(tmp_path).state_dict(), turbo.state_dict())


def test_adapters_and_biases_keep_separate_products(plain):
    for reason in ("q_proj is a Adapter", "q_proj has a bias"):
        model = copy.deepcopy(plain)
        linear = model.model.decoder.layers[1].self_attn.q_proj
        if "bias" in reason:
            linear.bias = torch.nn.Parameter(torch.zeros(linear.out_features))
        else:
            linear.__class__ = type("Adapter", (torch.nn.Linear,), {})
        replaced, kept = install(model, "turbo")
        assert "QKV" not in replaced
        assert f"layer 1: {reason}" in kept["QKV"]
        assert not any(isinstance(m, layers.JoinedLinear) for m in model.modules())


def test_adapters_loaded_afterwards_are_obeyed(plain, turbo):
    class Adapted(torch.nn.Module):
        """As PEFT wraps a layer: the layer's own weight, and an update beside it."""

        def __init__(self, base: torch.nn.Linear):
            super().__init__()
            self.base, self.weight = base, base.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + 0.5 * x.mean(-1, keepdim=True)

    plain = copy.deepcopy(plain)
    before = logits(plain)
    for model in (plain, turbo):
        for layer in model.model.decoder.layers:
            layer.router.proj = Adapted(layer.router.proj)
            layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    torch.testing.assert_close(logits(turbo), logits(plain), rtol=0, atol=2e-5)
    assert not torch.allclose(logits(plain), before, atol=1e-3)


def test_gradients_go_through_the_plain_layers(turbo):
    layer = turbo.model.decoder.layers[0]
    x = torch.randn(2, 32, requires_grad=True)
    forwards = layer.input_layernorm, lambda x: layers.DiffusionGemmaRMSNorm.forward(layer.input_layernorm, x)
    assert torch.equal(*(torch.autograd.grad(run(x).sum(), x)[0] for run in forwards))
    layer.input_layernorm(x).sum().backward()
    assert layer.input_layernorm.weight.grad is not None


def test_the_report_says_why_kernels_do_not_run(plain, monkeypatch):
    model = copy.deepcopy(plain)
    monkeypatch.setattr(layers, "INTERPRET", SimpleNamespace(value=False))
    replaced, kept = install(model, "turbo")
    assert set(replaced) == {"entropy"}
    assert "the model is on cpu, the kernels need a GPU" in kept["norms, QKV and sampling"]
    monkeypatch.setattr(layers, "HAS_TRITON", False)
    assert obstacle(model) == "Triton is not installed"
    monkeypatch.undo()
    model.lm_head._hf_hook = object()
    assert "hooks of the accelerate library" in obstacle(model)


# Sampling


def sampler(vocab: int, length: int) -> FusedSampler:
    bound = generation.EntropyBoundSamplerConfig(entropy_bound=0.1)
    config = generation.DiffusionGemmaGenerationConfig(
        max_denoising_steps=4, t_min=0.4, t_max=0.8, sampler_config=bound
    )
    shapes = SimpleNamespace(canvas_length=length, text_config=SimpleNamespace(vocab_size=vocab))
    return FusedSampler(SimpleNamespace(config=shapes), config)


def test_statistics_are_those_of_the_capped_and_scaled_logits():
    torch.manual_seed(0)
    raw = 20 * torch.randn(2, 3, 97)
    raw[0, 0, 5] = raw[0, 0, 50] = 90.0  # equal largest: the first one counts
    scaled = 30 * torch.tanh(raw.double() / 30) / (0.4 + 0.4 * 3 / 4)
    one = sampler(97, 3)
    probs = one.observe(raw.clone(), torch.zeros(2, dtype=torch.bool), 3, 30.0)
    exact = torch.softmax(scaled, -1)
    assert torch.equal(one.argmax, raw.argmax(-1))
    entropy = torch.distributions.Categorical(logits=scaled).entropy()
    # As kernels/sampling.py: approximate exponentials, 2^-22 each, of arguments up to 72 in fp32.
    torch.testing.assert_close(one.entropy.double(), entropy, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(one.confidence.double(), exact.amax(-1), rtol=1e-4, atol=1e-6)
    given = probs.softmax(dim=-1, dtype=torch.float32).to(torch.float32)
    torch.testing.assert_close(given.double(), exact, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(torch.softmax(probs.cpu(), -1), exact.float(), rtol=1e-3, atol=1e-6)


def test_draws_are_those_of_the_reference_and_rightly_distributed():
    """Three passes of one canvas and the first of the next, then chi-square of the reference over many seeds."""
    torch.manual_seed(0)
    one, raw = sampler(64, 3), 20 * torch.randn(2, 3, 64)
    nobody = torch.zeros(2, dtype=torch.bool)
    for canvas, step in ((0, 1), (0, 2), (1, 1)):
        scaled = 30 * torch.tanh(raw / 30) / (0.4 + 0.4 * (5 - step) / 4)
        one.observe(raw.clone(), nobody, 5 - step, 30.0)
        assert torch.equal(one.draw, counter_statistics(scaled, one._slots.seed, canvas, step).draw)
    assert one._slots.seed[0] != one._slots.seed[1]

    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    seeds = torch.empty(2000, dtype=torch.int64).random_()
    counts = counter_statistics(p.log().expand(2000, 2, 4), seeds, 0, 1).draw.flatten().bincount(minlength=4)
    chi = float(((counts - 4000 * p) ** 2 / (4000 * p)).sum())
    assert chi < 16.3, counts  # 0.999 of chi-square with 3 degrees of freedom


def test_passes_canvases_and_rows_draw_apart_and_finished_rows_stay():
    torch.manual_seed(0)
    one, flat = sampler(512, 3), torch.zeros(2, 3, 512)
    nobody, first = torch.tensor([False, False]), torch.tensor([True, False])
    draws = []
    for remaining in (4, 3, 4):  # the last one begins a canvas
        one.observe(flat.clone(), nobody, remaining, 30.0)
        draws += one.draw.tolist()
    assert len({tuple(row) for row in draws}) == len(draws)
    one.observe(flat.clone(), first, 3, 30.0)
    assert one.draw[0].tolist() == draws[4]
    assert one.draw[1].tolist() != draws[5]


# generate


def test_generate_is_deterministic_for_a_seed_in_every_cache(turbo):
    first = sequences, drafts = generate(turbo, 1)
    assert len(drafts) == 2
    assert sequences.shape == (2, 6)
    assert same(generate(turbo, 1), first) and same(generate(turbo, 1, cache_implementation="static"), first)
    assert not torch.equal(generate(turbo, 2)[0], sequences)


def test_first_pass_drafts_are_those_of_the_plain_layers(plain, turbo):
    """The first canvas comes from torch's generator in both, and an argmax does not depend on the draw."""
    one = {"max_denoising_steps": 1}
    assert torch.equal(generate(turbo, 7, **one)[1][0], generate(plain, 7, **one)[1][0])


def test_later_calls_use_their_own_settings(turbo):
    """Stops at once where anything is confident, and never where nothing is; two canvases."""
    loose = {"stability_threshold": 0, "confidence_threshold": 1e3}
    assert len(generate(turbo, 1, **loose, max_new_tokens=4, eos_token_id=[95])[1]) == 2
    assert len(generate(turbo, 1, stability_threshold=0, confidence_threshold=1e-9)[1]) == 2
    accepting = generation.EntropyBoundSamplerConfig(entropy_bound=1e3)
    assert not torch.equal(generate(turbo, 1, sampler_config=accepting)[1][1], generate(turbo, 1)[1][1])


def test_streamers_that_take_logits_get_them(turbo):
    class Logits(_Drafts):
        _takes_logits = True

        def put_draft(self, logits: torch.Tensor) -> None:
            self.drafts.append(logits)

    streamer = Logits()
    torch.manual_seed(1)
    turbo.generate(PROMPT, streamer=streamer, **SETTINGS)
    for given, draft in zip(streamer.drafts, generate(turbo, 1)[1], strict=True):
        assert torch.equal(given.argmax(-1), draft)


def test_own_logits_processors_are_obeyed(turbo):
    class Only7(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: torch.Tensor, cur_step: Any = None) -> torch.Tensor:
            return torch.full_like(scores, -1e9).index_fill(-1, torch.tensor([7]), 0.0)

    sequences, _ = generate(turbo, 1, logits_processor=LogitsProcessorList([Only7()]))
    assert (sequences[:, 4:] == 7).all()


@pytest.mark.gpu
def test_turbo_on_a_gpu():
    """The bundled model in BF16: logits close to the plain layers', the same text for the same seed."""
    path = find_checkpoint("demo")
    model = from_pretrained(path, dtype=torch.bfloat16, device_map="cuda").eval()
    redraft.accelerate(model, "off")
    ids = torch.tensor([[2, 50, 60, 70, 80]], device="cuda")
    canvas = torch.randint(0, model.config.text_config.vocab_size, (1, model.config.canvas_length), device="cuda")
    with torch.no_grad():
        plain = model(input_ids=ids, decoder_input_ids=canvas).logits
        report = redraft.accelerate(model)
        fused = model(input_ids=ids, decoder_input_ids=canvas).logits
    assert {"norms", "QKV", "sampling"} < set(report.replaced)
    # Both round to BF16 in the same places; sums in another order may send a row to another expert.
    assert float((fused - plain).norm() / plain.norm()) < 0.1
    assert torch.equal(*(same_bits.generate(model, ids, 5, max_new_tokens=64)[0] for _ in range(2)))
