"""Random checkpoints: the same for the same name, of a size that stays sane, and usable wherever a MODEL is."""

import dataclasses
import json
import time

import pytest
import torch
from cli.conftest import Run

import redraft
from redraft.config import QuantSpec
from redraft.errors import CheckpointError, RedraftError, UsageError
from redraft.kernels.packing import dequantize
from redraft.kernels.router import route
from redraft.network.arena import KVArena
from redraft.network.model import Model
from redraft.network.weights import Weights, iter_tensors, nbytes
from redraft.quant.load import load_checkpoint
from redraft.store import random as random_model
from redraft.store.open import find_checkpoint
from redraft.store.random import PRESETS, random_checkpoint, random_tokenizer, weight_bytes


def equal(a: Weights, b: Weights) -> bool:
    return all(torch.equal(x, y) for (_, x), (_, y) in zip(iter_tensors(a), iter_tensors(b), strict=True))


def logits(checkpoint, canvases: int = 1, prompt: int = 20) -> torch.Tensor:
    """A pass over random tokens, after a prompt and with self-conditioning from a first pass."""
    config, generator = checkpoint.config, torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (canvases, prompt + config.canvas_length), generator=generator)
    tokens = tokens.to(checkpoint.weights.embed.device)
    model = Model(config, checkpoint.weights)
    arena = KVArena(config, canvases, prompt, model.dtype, model.device)
    model.encode(tokens[:, :prompt], arena)
    first = model.denoise(tokens[:, prompt:], arena)
    return model.denoise(tokens[:, prompt:], arena, first / 0.8)


def test_a_name_is_its_weights() -> None:
    first = load_checkpoint("random:tiny", dtype=torch.float32)
    assert equal(first.weights, load_checkpoint("random:tiny:0", dtype=torch.float32).weights)
    assert not equal(first.weights, load_checkpoint("random:tiny:1", dtype=torch.float32).weights)
    assert (first.format, first.spec, str(first.path)) == ("dg-w4a16-v1", QuantSpec(), "random:tiny")


@pytest.mark.parametrize("name", ["random:", "random:7b", "random:tiny:", "random:tiny:x", "random:tiny:1:2"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"no such random model; known are random:26b-a4b, random:demo, random:tiny"):
        redraft.load(name)


def test_group_sizes_are_checked_and_used() -> None:
    assert random_checkpoint("random:tiny", spec=QuantSpec(32, 16)).weights.layers[0].experts.gu_s.shape == (8, 128, 4)
    with pytest.raises(UsageError, match="does not divide"):
        random_checkpoint("random:tiny", spec=QuantSpec(96, 64))


def test_bf16_experts_are_the_packed_ones_dequantised() -> None:
    packed = random_checkpoint("random:tiny", "w4", torch.float32)
    plain = random_checkpoint("random:tiny", "bf16", torch.float32)
    assert (plain.format, plain.spec) == ("bf16", None)
    # The same numbers in the same order of operations: the reference dequantises an expert to fp32 before it is used.
    assert torch.equal(logits(packed), logits(plain))


@pytest.mark.parametrize("weights", ["w4", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_announced_bytes_are_the_bytes(weights: str, dtype: torch.dtype) -> None:
    checkpoint = random_checkpoint("random:demo", weights, dtype)
    assert weight_bytes(checkpoint.config, checkpoint.spec, dtype) == nbytes(checkpoint.weights)


def test_every_matrix_has_variance_one_over_its_width() -> None:
    checkpoint = random_checkpoint("random:demo", "w4", torch.float32)
    layer = checkpoint.weights.layers[0]
    matrices = [checkpoint.weights.embed, layer.q_proj, layer.o_proj, layer.down_proj, layer.router_proj]
    packed = list(vars(layer.experts).values())
    matrices += [dequantize(*packed[:3]), dequantize(*packed[3:])]
    for matrix in matrices:
        # 16 * 256 numbers or more: the estimate's standard error is below 1.2 %, scales spread by 25 % add 2 %.
        assert float(matrix.std()) * matrix.shape[-1] ** 0.5 == pytest.approx(1, abs=0.06)
        assert abs(float(matrix.mean())) * matrix.shape[-1] ** 0.5 < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_keep_their_size_through_30_layers(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    tiny = PRESETS["tiny"]
    deep = dataclasses.replace(tiny, layers=(tiny.layers[0],) * 5 + (tiny.layers[1],))
    monkeypatch.setitem(PRESETS, "deep", dataclasses.replace(deep, layers=deep.layers * 5))
    out = logits(random_checkpoint("random:deep", dtype=dtype))
    assert bool(out.isfinite().all())
    assert 0.5 < float(out.std()) < 2  # a unit-variance vector times rows of variance 1 / H


def test_tokens_spread_over_all_experts_through_12_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after attention has averaged a long prefix: experts that nobody visits would not be read."""
    demo = PRESETS["demo"]
    wide = dataclasses.replace(demo, layers=demo.layers * 2, num_experts=64, canvas_length=128, sliding_window=256)
    monkeypatch.setitem(PRESETS, "wide", wide)
    visits = []

    def counted(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        routing, index = route(*args)  # type: ignore[arg-type]
        visits.append(torch.bincount(index.flatten(), minlength=64))
        return routing, index

    monkeypatch.setattr("redraft.network.model.route", counted)
    logits(random_checkpoint("random:wide"), prompt=256)
    last_pass = torch.stack(visits[-12:])  # 8 visits an expert on average
    assert last_pass.shape == (12, 64) and bool((last_pass.sum(1) == 512).all())
    assert float((last_pass > 0).float().mean()) > 0.98  # e^-8 are missed by chance
    assert int(last_pass.max()) < 32


def test_too_little_memory_is_said_before_anything_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_model, "free_memory", lambda device: 20_000_000_000)
    with pytest.raises(RedraftError, match=r"random:26b-a4b: the weights take 50\.5 GB and 20\.0 GB are free on cpu"):
        random_checkpoint("random:26b-a4b", "bf16")


def test_the_real_shapes_take_the_published_sizes() -> None:
    config = PRESETS["26b-a4b"]
    assert [i for i, layer in enumerate(config.layers) if layer.kind == "full"] == [5, 11, 17, 23, 29]
    assert weight_bytes(config, QuantSpec(), torch.bfloat16) / 2**30 == pytest.approx(16.0, abs=0.1)
    # transformers counts 25.29 B with its two vision layers; without them 25.25 B.
    assert weight_bytes(config, None, torch.bfloat16) / 2 == pytest.approx(25.25e9, rel=1e-3)


def test_there_are_no_files_behind_it() -> None:
    with pytest.raises(CheckpointError, match="random:tiny: random weights live in memory and have no files"):
        find_checkpoint("random:tiny")


@pytest.mark.parametrize("text", ["hi", "naïve café ☕\n\t end", "<294>", " "])
def test_the_tokenizer_keeps_bytes(text: str) -> None:
    tokenizer = random_tokenizer(PRESETS["tiny"])
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_tokenizer_shows_ids_that_are_no_bytes() -> None:
    tokenizer = random_tokenizer(PRESETS["tiny"])
    assert tokenizer.decode([1, 300, 319], skip_special_tokens=True) == "<300><319>"
    assert all(tokenizer.decode([i]) for i in range(PRESETS["tiny"].vocab_size))


def test_generate_from_the_command_line(run: Run) -> None:
    outcome = run("generate", "random:tiny", "hi", "--steps", "2", "--json", "--device", "cpu")
    result = json.loads(outcome.out)
    assert (outcome.code, result["weights"], result["steps_per_canvas"]) == (0, "w4", [2])
    assert "the weights are random" in outcome.err


def test_inspect_knows_the_shapes_without_drawing(run: Run) -> None:
    summary = json.loads(run("inspect", "random:26b-a4b", "--json").out)
    assert summary["parts"]["experts"]["parameters"] == 30 * 128 * 3 * 2816 * 704
    assert summary["total"]["bytes"] == weight_bytes(PRESETS["26b-a4b"], QuantSpec(), torch.bfloat16)


@pytest.mark.gpu
def test_the_real_shapes_are_drawn_in_seconds_and_run() -> None:
    began = time.perf_counter()
    checkpoint = random_checkpoint("random:26b-a4b", device="cuda")
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 30
    assert bool(logits(checkpoint).isfinite().all())
