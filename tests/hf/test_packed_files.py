"""Packed directories between transformers and Redraft: each loads what the other writes, or stops and says why."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from same_bits import assert_same_bits, assert_same_weights, assert_saves, from_pretrained, hub_snapshot
from tiny import published_layout, tiny_model, tiny_tokenizer
from transformers import AutoConfig, AutoModelForMultimodalLM, DiffusionGemmaForBlockDiffusion
from transformers.quantizers import auto

import redraft
from redraft.cli import main
from redraft.config import QuantSpec
from redraft.errors import CheckpointError, UsageError
from redraft.quant.load import load_checkpoint
from redraft.quant.quantize import export_compressed_tensors
from redraft.store.dg_w4a16 import FENCE, FENCE_FILE, FORMAT, DgW4A16
from redraft.store.read import open_checkpoint

SPEC = QuantSpec(16, 8)


@pytest.fixture
def copied(packed_dir: Path, tmp_path: Path) -> Path:
    """A packed directory to change."""
    return Path(shutil.copytree(packed_dir, tmp_path / "w4"))


@pytest.fixture(scope="module")
def saved_dir(packed_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `save_pretrained` writes of a packed model, with a tokenizer."""
    path = tmp_path_factory.mktemp("saved")
    from_pretrained(packed_dir).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def in_a_new_process(*lines: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False, capture_output=True, text=True)


class TestRegistration:
    def test_importing_redraft_loads_neither_torch_nor_transformers(self):
        code = "import sys, redraft; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
        assert in_a_new_process(code).returncode == 0

    @pytest.mark.parametrize("first", ["redraft", "transformers"])
    def test_import_redraft_is_enough(self, packed_dir: Path, first: str):
        """In either order, through the auto class, with nothing else imported by name."""
        imports = ["import redraft", "from transformers import AutoModelForMultimodalLM"]
        if first == "transformers":
            # Loaded to the end, which its lazy imports alone are not.
            imports = [f"{imports[1]}, DiffusionGemmaForBlockDiffusion", imports[0]]
        load = f"AutoModelForMultimodalLM.from_pretrained({str(packed_dir)!r})"
        result = in_a_new_process(*imports, f"print(type({load}.model.decoder.layers[0].experts).__name__)")
        assert result.stdout == "W4Experts\n", result.stderr

    def test_without_redraft_loading_stops(self, packed_dir: Path, saved_dir: Path, monkeypatch: pytest.MonkeyPatch):
        """transformers alone only warns of a method it does not know; the fence makes it an error."""
        for table in (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
            monkeypatch.delitem(table, FORMAT)
        for path in (packed_dir, saved_dir):
            with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
                from_pretrained(path)

    def test_a_transformers_that_does_not_fit_is_left_alone(self):
        code = """
import sys, warnings
sys.modules["redraft.hf"] = None
import redraft
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from transformers import DiffusionGemmaForBlockDiffusion
print([str(w.message) for w in caught if "Redraft" in str(w.message)])
"""
        result = in_a_new_process(code)
        assert "packed checkpoints cannot be loaded: Redraft does not fit this transformers" in result.stdout

    def test_configuration_is_what_quantize_writes(self):
        assert redraft.W4Config(16, 8).to_dict() == DgW4A16(SPEC).quantization_config()


class TestOursInTransformers:
    def test_auto_class(self, packed_dir: Path):
        model = AutoModelForMultimodalLM.from_pretrained(packed_dir)
        assert isinstance(model, DiffusionGemmaForBlockDiffusion)
        assert model.config.quantization_config.to_dict() == DgW4A16(SPEC).quantization_config()

    def test_hub_id(self, packed_dir: Path, tmp_path: Path):
        """From the hub's cache with no more files in it than transformers asks for."""
        snapshot = hub_snapshot(tmp_path, "name")
        snapshot.mkdir()
        index = json.loads((packed_dir / "model.safetensors.index.json").read_text())
        for name in {"config.json", "model.safetensors.index.json", *index["weight_map"].values()}:
            shutil.copyfile(packed_dir / name, snapshot / name)
        model = from_pretrained("org/name", cache_dir=tmp_path, local_files_only=True)
        assert_saves(model, tmp_path / "saved", packed_dir)

    def test_files_are_checked_before_loading(self, copied: Path):
        file = copied / "experts_001.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
        with pytest.raises(CheckpointError, match=rf"{file}: cut short within tensor"):
            from_pretrained(copied)

    def test_wrong_group_sizes_in_the_configuration(self, copied: Path):
        config = json.loads((copied / "config.json").read_text())
        config["quantization_config"]["group_down"] = 16
        (copied / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=r"config\.json: group_down is 16, but the shape of dn_s"):
            from_pretrained(copied)

    def test_method_named_but_no_index(self, copied: Path, packed_dir: Path, tmp_path: Path):
        """Published files to whose configuration somebody added the method: transformers does not see the experts."""
        config = (copied / "config.json").read_text()
        published_layout(copied)
        (copied / "config.json").write_text(config)
        model = from_pretrained(copied)
        assert_saves(model, tmp_path / "saved", packed_dir)

    def test_compressed_tensors(self, tmp_path: Path):
        """Under our method the same weights, instead of those of transformers' own method of that name."""
        tiny_model(hidden_size=128, moe_intermediate_size=64).save_pretrained(tmp_path / "bf16")
        export_compressed_tensors(tmp_path / "bf16", tmp_path / "ct", group=32)
        config = AutoConfig.from_pretrained(tmp_path / "ct")
        config.quantization_config = {"quant_method": FORMAT}
        model = from_pretrained(tmp_path / "ct", config=config)
        assert_saves(model, tmp_path / "saved", tmp_path / "ct")

    def test_offloaded_experts_are_refused(self, tiny_dir: Path, tmp_path: Path):
        with pytest.raises(UsageError, match="is offloaded; packed experts must fit the device"):
            spec = redraft.W4Config(16, 8)
            from_pretrained(tiny_dir, quantization_config=spec, device_map={"": "disk"}, offload_folder=str(tmp_path))


class TestTheirsInRedraft:
    def test_same_weights(self, packed_dir: Path, saved_dir: Path):
        files = open_checkpoint(saved_dir)
        assert (files.format, files.spec) == (FORMAT, SPEC)
        assert not any("experts" in note for note in files.notes)
        assert_same_weights(saved_dir, packed_dir)

    def test_sharded(self, packed_dir: Path, tmp_path: Path):
        model = from_pretrained(packed_dir)
        model.save_pretrained(tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 3
        assert_same_weights(tmp_path, packed_dir)
        assert_same_bits(model.state_dict(), from_pretrained(tmp_path).state_dict())

    def test_generate_and_inspect(self, saved_dir: Path, packed_dir: Path, capsys: pytest.CaptureFixture[str]):
        texts, sizes = [], []
        for path in (saved_dir, packed_dir):
            arguments = ["Hi", "--seed", "3", "--max-new-tokens", "8", "--json"]
            assert main(["generate", str(path), *arguments]) == 0
            texts.append(json.loads(capsys.readouterr().out.splitlines()[-1])["token_ids"])
            assert main(["inspect", str(path), "--json"]) == 0
            result = json.loads(capsys.readouterr().out.splitlines()[-1])
            sizes.append((result["format"], result["spec"], result["parts"]["experts"], result["total"]["bytes"]))
        assert texts[0] == texts[1] and sizes[0] == sizes[1]

    def test_damage_names_the_place(self, saved_dir: Path, tmp_path: Path):
        name = "model.decoder.layers.1.experts.dn_s"
        tensors = load_file(saved_dir / "model.safetensors")
        shutil.copytree(saved_dir, tmp_path / "w4")
        del tensors[name]
        save_file(tensors, tmp_path / "w4" / "model.safetensors", metadata={"format": "pt"})
        for load in (load_checkpoint, from_pretrained):
            with pytest.raises(CheckpointError, match=rf"{tmp_path / 'w4'}: tensor {name} is missing"):
                load(tmp_path / "w4")

    def test_fence_is_no_weight(self, packed_dir: Path):
        files = open_checkpoint(packed_dir, verify=True)
        assert FENCE not in files.text and (packed_dir / FENCE_FILE).stat().st_size < 200
