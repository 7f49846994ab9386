"""What answers for an arm: stock transformers untouched, models that share tensors, passes counted right."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion

import redraft
from redraft.config import DecodeSettings, QuantSpec
from redraft.device import default_dtype
from redraft.engine.events import Result
from redraft.errors import UsageError
from redraft.evaluate.arms import Arm, parse_arms
from redraft.evaluate.models import Models, TransformersEngine, generate_options, needed_bytes, stored_packed
from redraft.evaluate.run import Side
from redraft.hf.experts import W4Experts
from redraft.quant.quantize import export_compressed_tensors
from redraft.store.open import open_model
from redraft.store.random import PRESETS, weight_bytes

CPU = torch.device("cpu")
TINY = "random:tiny"
FRANCE = "What is the capital of France?"  # settles after two passes


def models_of(text: str, model: str = TINY, in_place: bool = False, on: torch.device = CPU) -> tuple[Models, list[Arm]]:
    arms = parse_arms(text, model)
    files = {arm.model: open_model(arm.model) for arm in arms}
    arms = [arm.resolved(stored_packed(files[arm.model])) for arm in arms]
    return Models(files, on, default_dtype(on), in_place), arms


def answer(opened: Side, prompt: str, *, seed: int, **settings: Any) -> Result:
    return opened.generate_batch([prompt], seed=[seed], **settings)[0]


QUESTION = {"seed": 3, "max_new_tokens": 16, "max_denoising_steps": 6}


def tokens(models: Models, arm: Arm) -> list[int]:
    return answer(models.open(arm), "abc", **QUESTION).token_ids


def transformers_model(opened: Any) -> Any:
    return opened.generate_batch.__self__.model


def test_stock_is_transformers_own_generate() -> None:
    models, (arm, _) = models_of("bf16,w4", "demo")
    opened = models.open(arm)
    result = answer(opened, FRANCE, seed=11)
    wrapped: TransformersEngine = opened.generate_batch.__self__  # type: ignore[attr-defined]
    stock = DiffusionGemmaForBlockDiffusion.from_pretrained(models.files["demo"].path, dtype=torch.float32)
    chat, options = [{"role": "user", "content": FRANCE}], {"return_tensors": "pt", "return_dict": True}
    ids = wrapped.tokenizer.apply_chat_template(chat, add_generation_prompt=True, **options)["input_ids"]
    torch.manual_seed(11)
    expected = stock.generate(ids)
    assert type(wrapped.model) is DiffusionGemmaForBlockDiffusion
    assert "_prepare_sampler" not in vars(wrapped.model)
    row = expected.sequences[0, ids.shape[1] :].tolist()
    assert row[: len(result.token_ids)] == result.token_ids
    assert set(row[len(result.token_ids) :]) <= {0}
    assert result.tokens_per_forward == pytest.approx(float(expected.tokens_per_forward))
    assert (result.text, result.finish_reason) == ("The capital of France is Paris.", "stop")
    assert (result.prompt_tokens, result.forwards, result.canvases) == (ids.shape[1], sum(result.steps_per_canvas), 1)


def test_passes_are_counted_per_canvas_and_hooks_are_gone() -> None:
    models, (arm, _) = models_of("bf16,w4")
    opened = models.open(arm)
    fixed = {"max_denoising_steps": 5, "stability_threshold": 5}
    result = answer(opened, "abc", seed=1, max_new_tokens=40, eos_token_ids=(), **fixed)
    assert result.steps_per_canvas == [5, 5, 5]  # canvases of 16
    assert (len(result.token_ids), result.canvases, result.finish_reason) == (40, 3, "length")
    model = transformers_model(opened)
    assert not model.model.encoder._forward_pre_hooks and not model.model.decoder._forward_pre_hooks


@pytest.mark.parametrize("name", ["bf16", "w4-off", "w4-turbo", "bf16-turbo", "engine-w4", "engine-bf16-off"])
def test_fixed_steps_stop_neither_early_nor_late(name: str) -> None:
    models, (arm, _) = models_of(f"{name},bf16+entropy_bound=1", "demo")
    opened, fixed = models.open(arm), {"max_denoising_steps": 7, "stability_threshold": 7}
    assert answer(opened, FRANCE, seed=0, max_new_tokens=32).steps_per_canvas == [2]
    assert answer(opened, FRANCE, seed=0, max_new_tokens=32, **fixed).steps_per_canvas == [7]


def test_the_w4_model_shares_all_but_the_experts_and_leaves_stock_alone() -> None:
    models, (bf16, w4, bitexact) = models_of("bf16,w4,w4-bitexact")
    stock = transformers_model(models.open(bf16))
    before = {name: tensor.clone() for name, tensor in stock.state_dict().items()}
    first = tokens(models, bf16)
    packed, once = (transformers_model(models.open(arm)) for arm in (w4, bitexact))
    experts = packed.model.decoder.layers[0].experts
    assert isinstance(experts, W4Experts) and experts is not stock.model.decoder.layers[0].experts
    assert experts is packed.model.encoder.language_model.layers[0].experts is once.model.decoder.layers[0].experts
    assert packed.model.decoder.embed_tokens.weight is stock.model.decoder.embed_tokens.weight
    assert "_prepare_sampler" in vars(once) and "_prepare_sampler" not in vars(packed)
    after = stock.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert tokens(models, bf16) == first
    assert tokens(models, w4) == tokens(models, bitexact)  # one random stream, the same experts


def test_a_tier_on_bf16_changes_no_token_and_not_the_stock_model() -> None:
    models, (stock, once) = models_of("bf16,bf16-bitexact")
    assert tokens(models, stock) == tokens(models, once) == tokens(models, stock)
    assert "_prepare_sampler" not in vars(transformers_model(models.open(stock)))


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_turbo_inside_transformers_on_either_weights(on: str) -> None:
    """The stock model stays stock beside the others."""
    models, (stock, *others) = models_of("bf16,bf16-turbo,w4-off,w4-turbo,engine-w4", on=torch.device(on))
    question = {**QUESTION, "max_denoising_steps": 2, "stability_threshold": 2}
    before = answer(models.open(stock), "abc", **question).token_ids
    for arm in others:
        opened = models.open(arm)
        if arm.runner == "transformers":
            assert ("generate" in vars(transformers_model(opened))) is (arm.tier == "turbo")
        first, second = (answer(opened, "abc", **question) for _ in range(2))
        assert set(first.steps_per_canvas) == {2}
        assert first.token_ids == second.token_ids
    assert answer(models.open(stock), "abc", **question).token_ids == before


def test_in_place_the_bf16_model_becomes_the_w4_one() -> None:
    models, (bf16, w4) = models_of("bf16,w4", in_place=True)
    stock = models.open(bf16)
    models.close([w4])
    packed = models.open(w4)
    assert transformers_model(packed) is transformers_model(stock)
    assert packed.weight_bytes < stock.weight_bytes
    apart, (source, fresh) = models_of("bf16,w4")
    apart.open(source)
    assert tokens(models, w4) == tokens(apart, fresh)


def test_transformers_and_the_engine_hold_the_same_random_weights() -> None:
    """transformers' generate and tier bitexact of the engine draw alike, so equal weights give equal tokens."""
    models, (stock, engine) = models_of("bf16,engine-bf16-bitexact")
    theirs, ours = (answer(models.open(arm), "abc def", **QUESTION) for arm in (stock, engine))
    assert theirs.token_ids == ours.token_ids
    assert (theirs.prompt_tokens, theirs.steps_per_canvas) == (ours.prompt_tokens, ours.steps_per_canvas)


def test_random_weights_alone_in_4_bits_are_those_of_the_pair() -> None:
    (alone, (w4, _)), (pair, (bf16, same)) = models_of("w4,w4-bitexact"), models_of("bf16,w4")
    pair.open(bf16)
    packed = [transformers_model(m.open(arm)).model.decoder.layers[1].experts for m, arm in ((alone, w4), (pair, same))]
    assert all(map(torch.equal, packed[0].parameters(), packed[1].parameters()))


def test_checkpoints_of_either_packed_format_as_they_are_stored(tmp_path: Path) -> None:
    """Three ways to the same 4-bit numbers: a packed directory, compressed-tensors, the engine's own reader."""
    spec = QuantSpec(64, 64)
    redraft.quantize("demo", tmp_path / "packed", spec)
    export_compressed_tensors("demo", tmp_path / "ct")
    models, arms = models_of(f"{tmp_path}/packed,{tmp_path}/ct,engine-w4-off@{tmp_path}/packed", "demo")
    assert [arm.weights for arm in arms] == ["w4"] * 3
    answers = [answer(models.open(arm), FRANCE, seed=5, max_new_tokens=32) for arm in arms]
    assert [each.text for each in answers] == ["The capital of France is Paris."] * 3
    for arm in arms[:2]:
        experts = transformers_model(models.open(arm)).model.decoder.layers[0].experts
        assert isinstance(experts, W4Experts) and experts.spec == spec


def test_needed_memory_counts_shared_tensors_once() -> None:
    config = PRESETS["tiny"]
    dense, packed = (weight_bytes(config, spec, torch.bfloat16) for spec in (None, QuantSpec()))
    # Half a byte a weight, and two fp16 numbers per group of 128 (gate and up) or 64 (down).
    e, h, i, layers = config.num_experts, config.hidden_size, config.moe_intermediate_size, config.num_layers
    experts = layers * e * (2 * i * (h // 2 + 4 * h // 128) + h * (i // 2 + 4 * i // 64))
    logits = 16 * 4 * config.canvas_length * config.vocab_size
    sizes = {"engine-bf16,engine-w4": dense + packed, "w4,turbo": packed, "bf16,w4,w4-turbo": dense + experts}
    for text, size in sizes.items():
        assert needed_bytes(parse_arms(text, TINY), {TINY: open_model(TINY)}, torch.bfloat16) == size + logits


def test_a_flat_temperature_is_refused_before_transformers_does() -> None:
    with pytest.raises(UsageError, match=r"t_max equals t_min \(0.4\)"):
        generate_options(DecodeSettings(t_min=0.4, t_max=0.4))
