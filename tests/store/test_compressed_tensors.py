"""compressed-tensors files: the library reads what is written to the same values, and the loader what it writes."""

import functools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from cli.conftest import Run
from safetensors.torch import load_file
from tiny import contents, edit_json, rewrite, stored, tiny_model, tiny_tokenizer

import redraft
from redraft.errors import CheckpointError, UsageError
from redraft.kernels.packing import dequantize, unpack_nibbles
from redraft.network.weights import iter_tensors
from redraft.quant.load import load_checkpoint
from redraft.quant.quantize import export_compressed_tensors
from redraft.store.compressed_tensors import LARGEST_SCALE, PROJECTIONS, SMALLEST_SCALE, CompressedTensors, pack
from redraft.store.names import canonical_name, expert_names
from redraft.store.random import unpack_experts
from redraft.store.read import INDEX, Checkpoint, open_checkpoint
from redraft.store.workdir import partial_path

EXPERT = "model.decoder.layers.1.experts.2"
SCALE = f"{EXPERT}.up_proj.weight_scale"
KEPT = "model-00004-of-00004.safetensors"  # after one file for each of three layers


@pytest.fixture(scope="module")
def bf16_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BF16 checkpoint whose experts divide into groups of 64 and 32."""
    path = tmp_path_factory.mktemp("bf16")
    tiny_model(hidden_size=128, moe_intermediate_size=64).bfloat16().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=[(64, False), (32, False), (64, True), (32, True)])
def exported(request: pytest.FixtureRequest, bf16_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    group, symmetric = request.param
    path = tmp_path_factory.mktemp("exported") / "ct"
    export_compressed_tensors(bf16_dir, path, group=group, symmetric=symmetric)
    return path


@pytest.fixture
def copy(bf16_dir: Path, tmp_path: Path) -> Path:
    """An export to damage."""
    path = tmp_path / "ct"
    export_compressed_tensors(bf16_dir, path, group=32)
    (path / "manifest.json").unlink()
    return path


def replace_tensor(path: Path, name: str, tensor: torch.Tensor) -> None:
    files = json.loads((path / INDEX).read_text())["weight_map"]
    rewrite(path / files[name], lambda tensors: {**tensors, name: tensor})


def same_experts(a: Checkpoint, b: Checkpoint, layer: int) -> bool:
    pairs = zip(*(vars(checkpoint.weights.layers[layer].experts).values() for checkpoint in (a, b)), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def library_scheme(path: Path):
    """The library's own reading of config.json."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    return quantization.QuantizationConfig.model_validate(config).config_groups["group_0"]


def library_weights(path: Path, tensors: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    """One Linear decompressed by the library."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    state = {name.removeprefix(f"{prefix}."): t for name, t in tensors.items() if name.startswith(f"{prefix}.")}
    return compressors.PackedQuantizationCompressor.decompress(state, library_scheme(path))["weight"]


class TestWrite:
    def test_library_reads_the_same_values(self, exported: Path):
        tensors, loaded = stored(exported), load_checkpoint(exported)
        for layer, weights in enumerate(loaded.weights.layers):
            dense = unpack_experts(weights.experts, torch.bfloat16)
            for expert in (0, 7):
                matrices = (*dense.gate_up[expert].chunk(2), dense.down[expert])
                for projection, ours in zip(PROJECTIONS, matrices, strict=True):
                    prefix = f"model.decoder.layers.{layer}.experts.{expert}.{projection}"
                    theirs = library_weights(exported, tensors, prefix)
                    assert theirs.dtype == torch.bfloat16 and torch.equal(theirs, ours), prefix

    def test_library_packs_the_same_words(self, exported: Path, bf16_dir: Path):
        """From the same scales and zero points the library rounds and packs to the same bits."""
        compressors = pytest.importorskip("compressed_tensors.compressors")
        tensors, prefix = stored(exported), f"{EXPERT}.down_proj"
        weight = load_checkpoint(bf16_dir, "bf16", torch.float32).weights.layers[1].experts.down[2]
        state = {"weight": weight, "weight_scale": tensors[f"{prefix}.weight_scale"].float()}
        if f"{prefix}.weight_zero_point" in tensors:
            zero, shape = tensors[f"{prefix}.weight_zero_point"], state["weight_scale"].shape
            unpack = compressors.pack_quantized.helpers.unpack_from_int32
            state["weight_zero_point"] = unpack(zero, 4, shape, packed_dim=0)
        packed = compressors.PackedQuantizationCompressor.compress(state, library_scheme(exported))
        for key in packed.keys() - {"weight_scale"}:
            assert torch.equal(packed[key], tensors[f"{prefix}.{key}"]), key

    def test_ignore_list_covers_all_but_experts(self):
        is_match = pytest.importorskip("compressed_tensors.utils").is_match
        ignore = CompressedTensors(64, True).quantization_config()["ignore"]
        linears = [(n, m) for n, m in tiny_model().named_modules() if isinstance(m, torch.nn.Linear)]
        assert len(linears) > 50 and all(is_match(name, module, ignore) for name, module in linears)
        for projection in PROJECTIONS:
            for side in ("decoder", "encoder.language_model"):
                assert not is_match(f"model.{side}.layers.0.experts.3.{projection}", torch.nn.Linear(1, 1), ignore)

    def test_names_shapes_and_dtypes(self, bf16_dir: Path, copy: Path):
        tensors = stored(copy)
        found = {n.removeprefix(f"{EXPERT}.down_proj."): t for n, t in tensors.items() if f"{EXPERT}.down_proj" in n}
        assert {key: (t.dtype, tuple(t.shape)) for key, t in found.items()} == {
            "weight_packed": (torch.int32, (128, 8)), "weight_scale": (torch.bfloat16, (128, 2)),
            "weight_zero_point": (torch.int32, (16, 2)), "weight_shape": (torch.int64, (2,)),
        }  # fmt: skip
        assert found["weight_shape"].tolist() == [128, 64]
        for name, tensor in load_file(bf16_dir / "model.safetensors").items():
            if ".experts." not in name:
                assert torch.equal(tensors[canonical_name(name)], tensor), name

    @pytest.mark.parametrize("symmetric", [False, True])
    def test_no_weight_moves_far(self, symmetric: bool):
        """Half a step by rounding, half a step at a saturated end, and what a BF16 scale is too small: 15 * 2^-9."""
        weight = torch.randn(64, 256).mul(torch.logspace(-4, 4, 64)[:, None])
        packed = pack(weight, CompressedTensors(32, symmetric), "w")
        scale, zero = packed["scale"].float(), torch.tensor(8.0)
        if not symmetric:
            zero = unpack_nibbles(packed["zero_point"].T.contiguous().view(torch.uint8)).T
        restored = dequantize(packed["packed"].view(torch.uint8), scale, zero.expand_as(scale))
        steps = (restored - weight).unflatten(-1, (-1, 32)).abs() / scale.unsqueeze(-1)
        assert float(steps.max()) <= 1.0 + 15 / 512

    def test_asymmetric_is_the_more_accurate(self, bf16_dir: Path, tmp_path: Path):
        asymmetric = export_compressed_tensors(bf16_dir, tmp_path / "asymmetric").tensors
        symmetric = export_compressed_tensors(bf16_dir, tmp_path / "symmetric", symmetric=True).tensors
        assert [t.name for t in asymmetric] == [name for layer in range(3) for name in expert_names(layer)]
        for better, worse in zip(asymmetric, symmetric, strict=True):
            assert 19 < worse.sqnr_db < better.sqnr_db < 23

    def test_extreme_weights(self):
        """Zero, tiny and huge groups get scales that BF16 and fp16 both hold; larger and broken ones are refused."""
        weight = torch.zeros(8, 128)
        weight[1], weight[2, 5], weight[3] = 1e-30, 15 * LARGEST_SCALE, -1e-6
        scale = pack(weight, CompressedTensors(32, False), "w")["scale"]
        assert torch.equal(scale.half().float(), scale.float())
        assert float(scale.min()) == SMALLEST_SCALE and float(scale.max()) == LARGEST_SCALE
        weight[2, 5] = 2e6
        with pytest.raises(CheckpointError, match="w: its weights are too large"):
            pack(weight, CompressedTensors(32, False), "w")
        weight[2, 5] = torch.nan
        with pytest.raises(CheckpointError, match="w: its weights are not all finite"):
            pack(weight, CompressedTensors(32, True), "w")

    def test_resumes(self, bf16_dir: Path, copy: Path, tmp_path: Path):
        """Stopped after two files, the same call writes the rest, and the result is the same bit for bit."""

        def stop(done: int, total: int) -> None:
            if done == 2:
                raise KeyboardInterrupt

        target = tmp_path / "again"
        with pytest.raises(KeyboardInterrupt):
            export_compressed_tensors(bf16_dir, target, group=32, progress=stop)
        kept = {f.name: f.stat().st_mtime_ns for f in partial_path(target).glob("*.safetensors")}
        assert len(kept) == 2 and not target.exists()
        export_compressed_tensors(bf16_dir, target, group=32)
        assert {name: (target / name).stat().st_mtime_ns for name in kept} == kept
        assert contents(copy).items() <= contents(target).items()
        with pytest.raises(UsageError, match="not empty"):
            export_compressed_tensors(bf16_dir, target, group=32)

    def test_refuses_what_does_not_divide(self, tiny_dir: Path, tmp_path: Path):
        with pytest.raises(UsageError, match="groups of 64 do not divide hidden_size 32"):
            export_compressed_tensors(tiny_dir, tmp_path / "ct")
        with pytest.raises(UsageError, match="group size is 128, expected 64 or 32"):
            export_compressed_tensors(tiny_dir, tmp_path / "ct", group=128)
        assert list(tmp_path.iterdir()) == []


class TestRead:
    def test_loads(self, exported: Path):
        loaded = load_checkpoint(exported, verify=True)
        assert loaded.format == "compressed-tensors" and loaded.spec.group_gate_up == loaded.spec.group_down
        experts = loaded.weights.layers[0].experts
        assert [t.dtype for _, t in iter_tensors(experts)] == [torch.uint8, torch.float16, torch.float16] * 2
        assert experts.gu_q.shape == (8, 128, 64) and experts.dn_q.shape == (8, 128, 32)

    def test_engine_answers(self, bf16_dir: Path, copy: Path):
        """The same tokens as the dequantised weights in plain experts give."""
        engine = redraft.load(copy)
        dense = redraft.load(bf16_dir, weights="bf16")
        for plain, packed in zip(dense.model.weights.layers, engine.model.weights.layers, strict=True):
            experts = unpack_experts(packed.experts, torch.float32)
            plain.experts.gate_up.copy_(experts.gate_up)
            plain.experts.down.copy_(experts.down)
        answers = [e.generate("Ab?", seed=3, max_new_tokens=16) for e in (engine, dense)]
        assert answers[0].text == answers[1].text

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_other_scale_dtypes(self, copy: Path, dtype: torch.dtype):
        before = load_checkpoint(copy)
        replace_tensor(copy, SCALE, stored(copy)[SCALE].to(dtype))
        assert same_experts(before, load_checkpoint(copy), 1)

    @pytest.mark.parametrize("value", [1.0078125 * 2**-18, 1e5, float("nan"), float("inf")])
    def test_scales_fp16_does_not_hold(self, copy: Path, value: float):
        scale = stored(copy)[SCALE]
        scale[0, 1] = value
        replace_tensor(copy, SCALE, scale)
        with pytest.raises(CheckpointError, match=rf"ct: tensor {re.escape(SCALE)}: fp16 does not hold 1 of its 256"):
            load_checkpoint(copy)

    def test_encoder_names(self, copy: Path):
        """Files whose tensors have the encoder's names give the same experts."""

        def encoders(name: str) -> str:
            return name.replace("model.decoder.", "model.encoder.language_model.")

        before = load_checkpoint(copy)
        for file in copy.glob("model-0000[123]*"):
            rewrite(file, lambda tensors: {encoders(n): t for n, t in tensors.items()})
        files = json.loads((copy / INDEX).read_text())["weight_map"]
        edit_json(copy / INDEX, weight_map={n if f == KEPT else encoders(n): f for n, f in files.items()})
        assert same_experts(before, load_checkpoint(copy), 2)

    @pytest.mark.parametrize(("where", "changes", "message"), [
        ("", {"quant_method": "gptq"}, "quantised with 'gptq'"),
        ("", {"format": "nvfp4-pack-quantized"}, "quantization_config.format is 'nvfp4-pack-quantized'"),
        ("config_groups", {"group_1": {}}, "config_groups is"),
        ("config_groups group_0 weights", {"num_bits": 8}, "weights.num_bits is 8"),
        ("config_groups group_0 weights", {"actorder": "group"}, "actorder is 'group'"),
        ("config_groups group_0 weights", {"strategy": "channel"}, "strategy is 'channel'"),
        ("config_groups group_0 weights", {"group_size": 7}, "group_size is 7"),
        ("config_groups group_0 weights", {"group_size": 96}, "groups of 96 do not divide"),
        ("config_groups group_0", {"input_activations": {"num_bits": 8}}, "input_activations is"),
        ("config_groups group_0 weights", {"group_size": 64}, "has shape [16, 2], expected"),
        ("config_groups group_0 weights", {"symmetric": True}, "zero_point belongs to no"),
    ])  # fmt: skip
    def test_refuses_other_schemes(self, copy: Path, where: str, changes: dict[str, object], message: str):
        scheme = json.loads((copy / "config.json").read_text())["quantization_config"]
        functools.reduce(dict.__getitem__, where.split(), scheme).update(changes)
        edit_json(copy / "config.json", quantization_config=scheme)
        with pytest.raises(CheckpointError, match=re.escape(message)):
            open_checkpoint(copy)

    def test_refuses_contradicting_shape(self, copy: Path):
        name = f"{EXPERT}.down_proj.weight_shape"
        replace_tensor(copy, name, torch.tensor([64, 128]))
        message = rf"{re.escape(name)} says \[64, 128\], config.json means \[128, 64\]"
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(copy)

    def test_missing_shard(self, copy: Path):
        (copy / "model-00002-of-00004.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"model-00002-of-00004.safetensors: shard is missing"):
            open_checkpoint(copy)

    def test_holds_no_bf16_experts(self, copy: Path):
        with pytest.raises(CheckpointError, match="holds 4-bit experts only"):
            load_checkpoint(copy, "bf16")
        with pytest.raises(CheckpointError, match=r"already packed \(compressed-tensors\)"):
            export_compressed_tensors(copy, copy.parent / "other")


class TestCommand:
    def test_export(self, run: Run, bf16_dir: Path, tmp_path: Path):
        target = tmp_path / "ct"
        command = ("export", bf16_dir, target, "--format", "compressed-tensors")
        done = run(*command, "--group-size", "32", "--symmetric", "--json")
        result = done.json
        assert done.code == 0 and result["symmetric"] is True
        assert result["spec"] == {"group_gate_up": 32, "group_down": 32}
        assert len(result["tensors"]) == 6 and result["bytes_after"] < result["bytes_before"]
        assert result["bytes_after"] == sum(t.nbytes for t in stored(target).values())
        done = run("inspect", target, "--verify")
        assert done.code == 0 and "compressed-tensors" in done.out
        shutil.rmtree(target)
        done = run(*command)
        assert done.code == 0 and "MB ->" in done.out

    @pytest.mark.parametrize(("options", "message"), [
        (["--format", "gguf"], "format is 'gguf', expected one of compressed-tensors"),
        (["--format", "compressed-tensors", "--group-size", "16"], "group size is 16, expected 64 or 32"),
    ])  # fmt: skip
    def test_errors(self, run: Run, bf16_dir: Path, tmp_path: Path, options: list[str], message: str):
        done = run("export", bf16_dir, tmp_path / "x", *options)
        assert done.code == 2 and message in done.err and not (tmp_path / "x").exists()
