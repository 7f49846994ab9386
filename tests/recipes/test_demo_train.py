"""The training code on a CPU at tiny size: parts that must agree with transformers, and a run from start to resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

from recipes.demo import layers, train
from recipes.demo.data import CANVAS, ROW, stream
from recipes.demo.optim import orthogonalize
from recipes.demo.tokenizer import build, save


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save(build(items_per_task=300), folder)
    return folder


def test_two_steps_save_and_resume(tokenizer_dir: Path, tmp_path: Path) -> None:
    shared = ["--tokenizer", str(tokenizer_dir), "--tiny", "--rows", "4", "--workers", "0", "--no-compile"]
    first, second = tmp_path / "first", tmp_path / "second"
    train.main([*shared, "--out", str(first), "--max-steps", "2", "--measure", "0"])
    train.main([*shared, "--out", str(second), "--max-steps", "1", "--measure", "0", "--resume", str(first)])
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(first, dtype=torch.bfloat16)
    sides = model.model.encoder.language_model, model.model.decoder
    scalars = [[float(layer.layer_scalar) for layer in side.layers] for side in sides]
    assert scalars == [list(train.ENCODER_SCALARS), list(train.DECODER_SCALARS)]
    assert model.generation_config.eos_token_id == [1, 4]
    assert model.generation_config.sampler_config.entropy_bound == 0.1
    before, after = (load_file(folder / train.STATE_FILE) for folder in (first, second))
    name = next(n for n in before if n.endswith("layers.0.experts.down_proj"))
    change = (before[name].float() - after[name].float()).norm() / before[name].float().norm()
    assert 0 < change < 0.1  # one small step on, not a new start


def test_losses_are_those_of_transformers_modules(tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense experts and product embeddings give what the stock modules give, but for BF16 rounding."""
    monkeypatch.setattr(layers, "rounding_noise", lambda weight, group: weight)
    torch.manual_seed(0)
    device = torch.device("cpu")
    model = train.build_model(AutoTokenizer.from_pretrained(tokenizer_dir), device, tiny=True)
    text: Any = model.config.text_config
    batch = train.to_device(next(stream(tokenizer_dir, 6, 0, 1)), device)
    noise = train.draw_noise(batch[-1], text.vocab_size)
    losses = train.Losses(model)
    text._experts_implementation = "eager"
    with torch.no_grad():
        stock = torch.stack(losses(*batch, noise))
        layers.embed_by_product(model.model.decoder.embed_tokens)
        layers.embed_by_product(model.model.encoder.language_model.embed_tokens)
        text._experts_implementation = layers.DENSE_EXPERTS
        ours = torch.stack(losses(*batch, noise))
    torch.testing.assert_close(ours, stock, rtol=3e-3, atol=0)


def test_masks_hide_the_present_and_what_left_the_window() -> None:
    start = torch.tensor([5, 100])
    masks = layers.decoder_masks(start, window=16)
    full, near = masks["full_attention"][:, 0, 0], masks["sliding_attention"][:, 0, 0]
    assert full.shape == (2, ROW + CANVAS)
    assert full[:, ROW:].all() and near[:, ROW:].all()
    assert full[:, :ROW].sum(1).tolist() == [5, 100]
    assert near[0, :ROW].nonzero().flatten().tolist() == list(range(5))
    assert near[1, :ROW].nonzero().flatten().tolist() == list(range(85, 100))  # window - 1 of them


def test_batches_place_the_canvas_after_the_prompt(tokenizer_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    batch, again = (next(stream(tokenizer_dir, 64, 0, 5)) for _ in range(2))
    assert (batch.tokens == again.tokens).all()
    for tokens, prompt, end, start in zip(batch.tokens, batch.prompt, batch.end, batch.start, strict=True):
        text = tokenizer.decode(tokens[:prompt])
        assert text.startswith("<bos><|turn>user\n") and text.endswith("<turn|>\n<|turn>model\n")
        assert tokens[end] == tokenizer.convert_tokens_to_ids("<turn|>")
        assert not tokens[end + 1 :].any()
        assert (start - prompt) % CANVAS == 0
        assert start + CANVAS <= ROW


def test_noise_covers_every_ratio() -> None:
    torch.manual_seed(0)
    clean = torch.full((400, CANVAS), 7)
    noise = train.draw_noise(clean, vocab_size=1000)
    ratio = (noise.canvas != 7).float().mean(1)
    assert ratio.min() < 0.1
    assert 0.45 < ratio.mean() < 0.65
    assert (ratio > 0.99).float().mean() > 0.08  # pure noise, as at the start of a generation
    assert (noise.earlier != 7).float().mean() > ratio[:200].mean()


def test_rounding_noise_has_the_size_of_four_bits() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    error, groups = layers.rounding_noise(weight, 128) - weight, weight.unflatten(-1, (2, 128))
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    assert (error.unflatten(-1, (2, 128)).abs() <= step[..., None] / 2 + 1e-6).all()
    assert 0.07 < error.std() < 0.13  # about 20 dB below normal weights


def test_orthogonalize_levels_singular_values() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(3, 32, 64)).float())
    assert 0.5 < values.min() <= values.max() < 1.4


def test_rate_warms_up_and_falls_to_zero() -> None:
    assert train.rate(0, 0.0, 0.5) == pytest.approx(1 / train.WARM_UP_STEPS)
    assert train.rate(10_000, 0.3, 0.5) == 1.0
    assert train.rate(10_000, 0.75, 0.5) == pytest.approx(0.5)
    assert train.rate(10_000, 1.0, 0.5) == 0.0
