"""The model inside transformers: same tokens as stock generate, same bits by every way of packing, nothing lost."""

from __future__ import annotations

import copy
import inspect
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from parity import EXCUSED_MARGIN, smallest_margin
from safetensors import safe_open
from same_bits import assert_same_bits, from_pretrained, generate, load, same
from tiny import dequantized, published_layout, tiny_model
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma import generation_diffusion_gemma as generation

import redraft
from redraft.config import QuantSpec
from redraft.errors import CheckpointError, UsageError
from redraft.evaluate.demo import TASKS
from redraft.hf import inplace
from redraft.hf.experts import W4Experts
from redraft.kernels.experts import run_experts
from redraft.kernels.experts_layout import repack, unpack_layer
from redraft.network.weights import iter_tensors
from redraft.quant.load import load_checkpoint
from redraft.quant.rtn import quantize_experts
from redraft.store.dg_w4a16 import FENCE
from redraft.store.names import PACKED_NAMES
from redraft.store.open import find_checkpoint, load_tokenizer

SPEC = QuantSpec(16, 8)  # groups that divide the tiny model's shapes


def stock_and_packed(model: Any, spec: QuantSpec | None = None) -> tuple[Any, Any]:
    """(stock transformers with the dequantised weights, the same model packed in place)."""
    packed = copy.deepcopy(model)
    redraft.accelerate(packed, "off", spec)
    return dequantized(model, packed), packed


@pytest.fixture(scope="module")
def pair(tiny_hf):
    return stock_and_packed(copy.deepcopy(tiny_hf), SPEC)


@pytest.fixture(scope="module")
def demo():
    """The bundled checkpoint in fp32."""
    return stock_and_packed(load(find_checkpoint("demo"), dtype=torch.float32).eval())


def expert_tensors(model: Any) -> dict[str, torch.Tensor]:
    layers = model.model.decoder.layers
    return {f"{i}.{k}": v for i, layer in enumerate(layers) for k, v in iter_tensors(layer.experts.packed())}


# Tokens


def margin_of(model: Any, ids: torch.Tensor, seed: int, passes: int, monkeypatch: Any, **settings: Any) -> float:
    """The smallest of the decisions that stock transformers makes in the first `passes` passes."""
    margins, original = [], generation.EntropyBoundSampler.accept_canvas

    def accept_canvas(self: Any, current: Any, drawn: Any, logits: Any, step: Any) -> Any:
        margins.append(smallest_margin(logits, self.entropy_bound, model.generation_config.confidence_threshold))
        return original(self, current, drawn, logits, step)

    with monkeypatch.context() as patch:
        patch.setattr(generation.EntropyBoundSampler, "accept_canvas", accept_canvas)
        generate(model, ids, seed, **settings)
    return min(margins[:passes])


def test_forty_seeds_give_the_tokens_of_stock_transformers(demo, monkeypatch, record_property):
    stock, packed = demo
    tokenizer = load_tokenizer(find_checkpoint("demo"))
    excused = []
    for seed in range(40):
        item = TASKS[("facts", "lists")[seed % 2]].items(seed + 1)[seed]
        chat = [{"role": "user", "content": item.prompt}]
        encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = encoded["input_ids"]
        runs = {}
        for tier in ("off", "bitexact"):
            redraft.accelerate(packed, tier)
            runs[tier] = generate(packed, ids, seed, max_new_tokens=64)
        assert same(runs["off"], runs["bitexact"]), f"seed {seed}: bitexact differs from off"
        expected = generate(stock, ids, seed, max_new_tokens=64)
        if not same(runs["off"], expected):
            pairs = zip(runs["off"][1], expected[1], strict=False)
            passes = 1 + next(i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b))
            margin = margin_of(stock, ids, seed, passes, monkeypatch, max_new_tokens=64)
            assert margin < EXCUSED_MARGIN, f"seed {seed}: differs at pass {passes} with every margin above {margin:g}"
            excused.append(f"seed {seed}: pass {passes}, margin {margin:.1e}")
    record_property("excused", excused)
    print("excused:", excused)
    assert len(excused) <= 2


BATCH = torch.tensor([[0, 0, 2, 30, 41, 17], [2, 8, 9, 10, 11, 12], [0, 2, 50, 51, 52, 53]])
SETTINGS = {"max_new_tokens": 16, "pad_token_id": 0, "eos_token_id": [1], "attention_mask": BATCH != 0}


@pytest.mark.parametrize("tier", ["off", "bitexact"])
@pytest.mark.parametrize("extra", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_batches_caches_and_later_calls_with_other_settings(pair, tier, extra, monkeypatch):
    """In both exact tiers as in stock transformers, there without torch.compile, which draws other random numbers."""
    stock, packed = pair
    uncompiled = Mock(side_effect=lambda *fns: (stock.model.encoder, stock.forward, *fns))
    monkeypatch.setattr(stock, "_compile_functions", uncompiled)  # disable_compile is not in the oldest transformers
    redraft.accelerate(packed, tier)
    for seed, bound in enumerate((0.1, 30.0, 2.0)):
        settings = {
            **SETTINGS, **extra, "sampler_config": generation.EntropyBoundSamplerConfig(entropy_bound=bound),
            "max_denoising_steps": 4 + seed, "stability_threshold": seed, "confidence_threshold": 3.0,
        }  # fmt: skip
        expected = generate(stock, BATCH, seed, **settings)
        assert same(generate(packed, BATCH, seed, **settings), expected), (tier, bound)


def test_entropy_is_computed_once_a_pass(pair, monkeypatch):
    _, packed = pair
    entropy = Mock(side_effect=torch.distributions.Categorical.entropy)
    monkeypatch.setattr(torch.distributions.Categorical, "entropy", lambda self: entropy(self))
    for tier, calls in (("off", 2), ("bitexact", 1), ("off", 2)):
        redraft.accelerate(packed, tier)
        entropy.reset_mock()
        _, drafts = generate(packed, BATCH, 0, **SETTINGS)
        assert entropy.call_count == calls * len(drafts), tier


def test_a_cache_can_be_handed_on(pair):
    """Under the keyword of this transformers and, where it is still understood, the older one."""
    stock, packed = pair
    redraft.accelerate(packed, "bitexact")
    new = "cache" in inspect.signature(DiffusionGemmaForBlockDiffusion.generate).parameters
    prompt, more = BATCH[1:2], torch.tensor([[30, 31, 32]])
    for keyword in ("cache", "past_key_values") if new else ("past_key_values",):
        results = []
        for model in (stock, packed):
            settings = {**SETTINGS, "max_new_tokens": 8, "attention_mask": torch.ones(1, 6)}
            torch.manual_seed(3)
            first = model.generate(prompt, **settings)
            cache = first.cache if new else first.past_key_values
            settings["attention_mask"] = torch.ones(1, cache.get_seq_length() + 3)
            results.append(model.generate(more, **{keyword: cache}, **settings).sequences)
        assert torch.equal(*results)


# Bits


def test_every_way_of_packing_gives_the_same_bits(pair, tiny_dir, packed_dir, tmp_path):
    """Offline, on load, in place, and what save_pretrained wrote from each."""
    _, in_place = pair
    offline = load_checkpoint(packed_dir)
    published = Path(shutil.copytree(packed_dir, tmp_path / "published"))
    published_layout(published)
    expected = {f"{i}.{k}": v for i, w in enumerate(offline.weights.layers) for k, v in iter_tensors(w.experts)}
    models = {
        "in place": in_place,
        "on load": load(tiny_dir, quantization_config=redraft.W4Config(16, 8)),
        "packed files": load(packed_dir),
        "published files": load(published, quantization_config=redraft.W4Config()),
    }
    reference, tokens = in_place.state_dict(), generate(in_place, BATCH, 1, **SETTINGS)
    for way, model in models.items():
        assert_same_bits(expert_tensors(model), expected)
        assert_same_bits(model.state_dict(), reference)
        model.save_pretrained(tmp_path / way)
        again = load(tmp_path / way)
        assert_same_bits(again.state_dict(), reference)
        assert same(generate(again, BATCH, 1, **SETTINGS), tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bundled_checkpoint_packed_offline_on_load_and_in_place(demo, dtype, tmp_path):
    """The same bits in either dtype, nothing missing, unexpected or NaN; and so the same tokens."""
    redraft.quantize("demo", tmp_path / "w4")
    path, prompt = find_checkpoint("demo"), torch.tensor([[2, 8, 9, 10]])
    models = [load(tmp_path / "w4", dtype=dtype), load(path, dtype=dtype, quantization_config=redraft.W4Config())]
    redraft.accelerate(demo[1], "off")
    state = {name: t.to(dtype) if t.dtype == torch.float32 else t for name, t in demo[1].state_dict().items()}
    for model in models:
        assert_same_bits(model.state_dict(), state)
        if dtype == torch.float32:
            assert same(generate(model, prompt, 5, max_new_tokens=32), generate(demo[1], prompt, 5, max_new_tokens=32))


def test_sharded_checkpoints_load(tiny_hf, pair, tmp_path, monkeypatch):
    """BF16 shards while loading, and a packed directory whose other tensors are in shards."""
    tiny_hf.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    monkeypatch.setattr("redraft.store.write.SHARD_BYTES", 60_000)
    redraft.quantize(tmp_path / "shards", tmp_path / "w4", SPEC)
    assert len(list((tmp_path / "w4").glob("model-*.safetensors"))) > 1
    for path, settings in (("shards", {"quantization_config": redraft.W4Config(16, 8)}), ("w4", {})):
        model = load(tmp_path / path, **settings)
        assert_same_bits(model.state_dict(), pair[1].state_dict())


def test_a_failure_half_way_is_not_taken_for_a_packed_model():
    model = tiny_model()
    with torch.no_grad():
        model.model.decoder.layers[1].experts.down_proj[3, 0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"layer 1: experts.down_proj\[3\]: 1 of 512 weights are not finite"):
        redraft.accelerate(model, spec=SPEC)
    with pytest.raises(UsageError, match=r"layer 0: experts.gate_up_proj is not transformers' own weight"):
        redraft.accelerate(model, spec=SPEC)


def test_saved_files_hold_one_copy_under_the_names_of_the_format(pair, tmp_path):
    _, packed = pair
    packed.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if ".experts." in name]  # noqa: SIM118
        experts = [f"model.decoder.layers.{i}.experts.{name}" for i in range(3) for name in PACKED_NAMES]
        assert sorted(names) == sorted([FENCE, *experts])
        assert {file.get_tensor(n).dtype for n in names if n[-1] in "sz"} == {torch.float16}


def test_one_copy_serves_encoder_and_decoder(pair, tiny_dir):
    _, in_place = pair
    loaded = load(tiny_dir, quantization_config=redraft.W4Config(16, 8))
    for model in (in_place, loaded):
        model.tie_weights()  # resizing embeddings and others call it
        decoder, encoder = model.model.decoder.layers, model.model.encoder.language_model.layers
        assert all(a.experts is b.experts for a, b in zip(decoder, encoder, strict=True))


def test_scales_stay_fp16(tiny_dir, tmp_path, pair):
    model = load(tiny_dir, dtype=torch.bfloat16, quantization_config=redraft.W4Config(16, 8))
    assert model.dtype == torch.bfloat16
    assert_same_bits(expert_tensors(model), expert_tensors(pair[1]))
    model.save_pretrained(tmp_path)
    again = load(tmp_path, dtype=torch.float32)
    assert again.dtype == torch.float32
    assert_same_bits(expert_tensors(again.to(torch.float64)), expert_tensors(pair[1]))


def test_one_layer_of_unpacked_experts_at_a_time(monkeypatch):
    """Before a layer is packed, the unpacked weights of the layers before it are gone."""
    model = tiny_model()
    alive = [weakref.ref(p) for layer in model.model.decoder.layers for p in layer.experts.parameters()]
    counts = []

    def pack(*args: Any, **kwargs: Any) -> Any:
        counts.append(sum(ref() is not None for ref in alive))
        return quantize_experts(*args, **kwargs)

    monkeypatch.setattr(inplace, "quantize_experts", pack)
    report = redraft.accelerate(model, "turbo", SPEC)
    assert counts == [6, 4, 2]
    assert not any(ref() is not None for ref in alive)
    gate_up, down = 3 * 8 * 2 * 16 * 32, 3 * 8 * 32 * 16  # weights
    assert report.expert_bytes_before == 4 * (gate_up + down)
    assert report.expert_bytes_after == (gate_up + down) // 2 + 4 * gate_up // 16 + 4 * down // 8


def test_report_says_what_was_replaced(pair):
    _, packed = pair
    off, turbo = redraft.accelerate(packed, "off"), redraft.accelerate(packed)
    assert (off.layers_packed, off.spec) == (0, SPEC)
    assert {"entropy", "norms, QKV and sampling"} <= set(off.kept)
    assert {"entropy", "generate"} < set(turbo.replaced)
    assert "need a GPU" in turbo.kept["norms, QKV and sampling"]
    assert str(turbo).startswith("tier turbo\nreplaced experts: 4 bits in groups of 16")
    assert turbo.to_dict()["spec"] == {"group_gate_up": 16, "group_down": 8}


# The kernels' layout


def test_repacked_experts_are_recovered_bit_for_bit_and_saved(tmp_path):
    """What a GPU holds, set up on a CPU: no parameters, and yet the saved files are those of the format."""
    spec = QuantSpec(64, 32)
    model = tiny_model(hidden_size=128, moe_intermediate_size=64, num_experts=4)
    redraft.accelerate(model, "off", spec)
    expected, state = expert_tensors(model), {k: v.clone() for k, v in model.state_dict().items()}
    experts = model.model.decoder.layers[0].experts
    x, index = torch.randn(5, 128), torch.tensor([[0, 1], [1, 3], [2, 0], [3, 2], [1, 0]])
    weights = torch.rand(5, 2)
    reference = experts(x.bfloat16(), index, weights)
    for layer in model.model.decoder.layers:
        packed = layer.experts.packed()
        layer.experts.repacked = repack(packed, layer.experts.config, spec)
        assert_same_bits(vars(unpack_layer(layer.experts.repacked, layer.experts.config)), vars(packed))
        for name in PACKED_NAMES:
            delattr(layer.experts, name)
    inplace.set_ties(model)
    out = experts(x.bfloat16(), index, weights)
    torch.testing.assert_close(out, reference, rtol=0.02, atol=0.02 * float(reference.abs().max()))
    assert_same_bits(expert_tensors(model), expected)
    model.save_pretrained(tmp_path)
    assert_same_bits(load(tmp_path).state_dict(), state)


@pytest.mark.gpu
def test_kernels_run_on_a_gpu():
    model = load(find_checkpoint("demo"), dtype=torch.bfloat16, device_map="cuda").eval()
    report = redraft.accelerate(model)
    assert "GPU kernels" in report.replaced["experts"]
    experts = model.model.decoder.layers[0].experts
    x = torch.randn(64, experts.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    weights, index = torch.rand(64, experts.num_experts, device="cuda").topk(experts.config.top_k_experts)
    reference = run_experts(x.float(), experts.packed(), weights, index)
    error = (experts(x, index, weights).float() - reference).norm() / reference.norm()
    assert float(error) < 0.02


# Refusals


def broken(change: str) -> Any:
    model = tiny_model()
    layer = model.model.decoder.layers[1]
    if change == "quantised":
        model.quantization_method = "bitsandbytes"
    elif change == "offloaded":
        layer.experts.to("meta")
    elif change == "untied":
        layer.experts.down_proj = torch.nn.Parameter(layer.experts.down_proj + 1)
    elif change == "other module":
        layer.experts = torch.nn.Identity()
    return model


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ("", {"tier": "fast"}, "tier is 'fast', expected one of off, bitexact, turbo"),
        ("", {}, "group_gate_up 128 does not divide hidden_size 32"),
        ("", {"spec": QuantSpec(16, 64)}, "group_down 64 does not divide moe_intermediate_size 16"),
        ("quantised", {"spec": SPEC}, "quantised with 'bitsandbytes'"),
        ("offloaded", {"spec": SPEC}, "layer 1: experts.gate_up_proj is offloaded"),
        ("untied", {"spec": SPEC}, "layer 1: experts.down_proj differs between encoder and decoder"),
        ("other module", {"spec": SPEC}, "layer 1: experts.gate_up_proj is not transformers' own weight"),
    ],
)
def test_refusals_name_the_reason_and_change_nothing(change, arguments, message):
    model = broken(change)
    with pytest.raises(UsageError, match=message):
        redraft.accelerate(model, **arguments)
    assert not any(isinstance(module, W4Experts) for module in model.modules())


def test_another_class_and_another_spec_are_refused(pair):
    with pytest.raises(UsageError, match="is a Linear, expected a loaded DiffusionGemmaForBlockDiffusion"):
        redraft.accelerate(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="packed with QuantSpec\\(group_gate_up=16, group_down=8\\) already"):
        redraft.accelerate(pair[1], spec=replace(SPEC, group_down=4))


def test_groups_that_do_not_fit_are_refused_on_load(tiny_dir):
    with pytest.raises(UsageError, match="group_gate_up 128 does not divide hidden_size 32"):
        from_pretrained(tiny_dir, quantization_config=redraft.W4Config())
