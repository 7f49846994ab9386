"""Merging LoRA adapters: the merged checkpoint computes what the unmerged adapter does, or the merge is refused."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import DECODER, ENCODER, PROMPT, inputs, peft_model, reference_logits
from cli.conftest import Run
from safetensors.torch import save_file
from tiny import CANVAS, VOCAB, contents, stored, tiny_model
from transformers import DiffusionGemmaForBlockDiffusion

import redraft.store.write as rewrite
from redraft.errors import CheckpointError, UsageError
from redraft.network.arena import KVArena
from redraft.network.model import Model
from redraft.quant.load import load_checkpoint
from redraft.quant.lora import merge_lora
from redraft.store.names import canonical_name
from redraft.store.read import open_checkpoint
from redraft.store.workdir import partial_path

Q = "layers.0.self_attn.q_proj"


def config(**changes: Any) -> dict[str, Any]:
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}
    return {**plain, "use_dora": False, "init_lora_weights": True, "megatron_core": "megatron.core", **changes}


def factors(module: str, out: int, width: int, rank: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    name = f"base_model.model.{module}"
    return {
        f"{name}.lora_A.weight": torch.randn(rank, width, generator=generator),
        f"{name}.lora_B.weight": torch.randn(out, rank, generator=generator),
    }


def write_adapter(path: Path, settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def bf16_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bf16")
    tiny_model().bfloat16().save_pretrained(path)
    return path


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Of one projection, on the decoder's side."""
    return write_adapter(tmp_path / "a", config(), factors(f"{DECODER}{Q}", 32, 32))


def merged_logits(path: Path) -> torch.Tensor:
    """Redraft's own, in fp32."""
    loaded = load_checkpoint(path, "bf16", torch.float32)
    model = Model(loaded.config, loaded.weights)
    prompt, canvas, conditioning = inputs()
    arena = KVArena(loaded.config, 2, PROMPT + CANVAS, torch.float32, torch.device("cpu"), torch.tensor([0, 0]))
    model.encode(prompt, arena)
    return model.denoise(canvas, arena, conditioning)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 3}, "alpha_pattern": {r".*mlp\.\w+": 5}},
    # In the decoder only, so that nothing else changes with it.
    "one part of one side": {"target_modules": r"model\.decoder\.self_conditioning\.\w+_proj"},
}


class TestAgainstPeft:
    @pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
    def test_logits_equal_the_unmerged_adapter(self, settings: dict[str, Any], tiny_dir: Path, tmp_path: Path):
        model = peft_model(tiny_dir, **settings)
        model.save_pretrained(tmp_path / "adapter")
        report = merge_lora(tiny_dir, tmp_path / "adapter", tmp_path / "merged")
        # 3 layers: q k o gate up down router each, v on the two sliding ones, and three of self-conditioning.
        assert len(report.tensors) == (3 if "target_modules" in settings else 3 * 7 + 2 + 3) and report.notes == []
        expected, before = reference_logits(model), merged_logits(tiny_dir)
        # fp32 sums in another order, through three layers: as far as Redraft and transformers differ without adapters.
        torch.testing.assert_close(merged_logits(tmp_path / "merged"), expected, rtol=0, atol=1e-4)
        assert (expected - before).abs().max() > 0.5, "an adapter that changes nothing proves nothing"
        loaded, info = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path / "merged", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        torch.testing.assert_close(reference_logits(loaded.eval()), expected, rtol=0, atol=1e-4)

    @pytest.mark.parametrize("side", ["decoder", "encoder"])
    def test_one_side(self, side: str, tiny_dir: Path, tmp_path: Path):
        """Refused, because the result would not compute what the adapter does; if asked for, as PEFT itself merges."""
        model = peft_model(tiny_dir, side)
        model.save_pretrained(tmp_path / "adapter")
        other = "encoder" if side == "decoder" else "decoder"
        named = f"23 weights are named on the {side}'s side only"
        with pytest.raises(CheckpointError, match=rf"{named}, .* so merging changes the {other} too.*--both-sides"):
            merge_lora(tiny_dir, tmp_path / "adapter", tmp_path / "merged")
        assert not (tmp_path / "merged").exists()
        report = merge_lora(tiny_dir, tmp_path / "adapter", tmp_path / "merged", both_sides=True)
        assert len(report.tensors) == 3 * 7 + 2
        (note,) = report.notes
        assert note.startswith(named)
        expected = reference_logits(model)
        assert (merged_logits(tmp_path / "merged") - expected).abs().max() > 0.1, "then refusing would be wrong"
        theirs = {canonical_name(n): p for n, p in model.merge_and_unload().named_parameters()}
        ours, base = stored(tmp_path / "merged"), stored(tiny_dir)
        for tensor in report.tensors:
            torch.testing.assert_close(ours[tensor.name], theirs[tensor.name].data, rtol=0, atol=1e-5)
            assert not torch.equal(ours[tensor.name], base[tensor.name])


class TestValues:
    @pytest.mark.parametrize("prefix", [DECODER, ENCODER, "decoder.", "encoder.language_model."])
    def test_summed_in_fp32_and_rounded_once(self, prefix: str, bf16_dir: Path, tmp_path: Path):
        """Also: every name of the tied weight will do, and nothing else changes."""
        pair = {n: t.bfloat16() for n, t in factors(f"{prefix}{Q}", 32, 32).items()}
        report = merge_lora(bf16_dir, write_adapter(tmp_path / "a", config(), pair), tmp_path / "m", both_sides=True)
        (merged,) = report.tensors
        assert (merged.name, merged.rank, merged.scale) == (f"{DECODER}{Q}.weight", 4, 2.0)
        a, b = (t.float() for t in pair.values())
        before, after = stored(bf16_dir), stored(tmp_path / "m")
        expected = (before[merged.name].float() + b @ a * 2.0).bfloat16()
        assert before.keys() == after.keys() and torch.equal(after[merged.name], expected)
        for name in before.keys() - {merged.name}:
            assert torch.equal(before[name], after[name]), name

    @pytest.mark.parametrize(("settings", "scale"), [
        ({"lora_alpha": 6}, 1.5), ({"use_rslora": True}, 4.0), ({"r": 8, "rank_pattern": {"q_proj": 4}}, 2.0),
        ({"alpha_pattern": {r"decoder.*q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"proj": 2}}, 2.0),  # a pattern matches whole parts of the name
    ])  # fmt: skip
    def test_scales(self, bf16_dir: Path, adapter: Path, tmp_path: Path, settings: dict[str, Any], scale: float):
        (adapter / "adapter_config.json").write_text(json.dumps(config(**settings)))
        report = merge_lora(bf16_dir, adapter, tmp_path / "m", both_sides=True)
        assert math.isclose(report.tensors[0].scale, scale)

    def test_vision_can_be_merged(self, bf16_dir: Path, tmp_path: Path):
        name = "model.encoder.vision_tower.encoder.layers.0.mlp.up_proj.linear"
        adapter = write_adapter(tmp_path / "a", config(), factors(name, 16, 16))
        merge_lora(bf16_dir, adapter, tmp_path / "m")
        assert not torch.equal(stored(tmp_path / "m")[f"{name}.weight"], stored(bf16_dir)[f"{name}.weight"])


class TestRefused:
    @pytest.mark.parametrize(("settings", "message"), [
        ({"peft_type": "LOHA"}, "adapter_config.json: peft_type is 'LOHA'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters is ['experts.gate_up_proj']"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"something_new": {"x": 1}}, "something_new is {'x': 1}"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the base weights"),
        ({"r": 3}, "ranks 4 and 4, adapter_config.json means 3 for this module"),
        ({"rank_pattern": {"q_proj": 2}}, "means 2 for this module"),
        ({"lora_alpha": None}, f"lora_alpha of {DECODER}{Q} is None, expected a positive number"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern cannot be read"),
    ])  # fmt: skip
    def test_settings(self, bf16_dir: Path, adapter: Path, tmp_path: Path, settings: dict[str, Any], message: str):
        (adapter / "adapter_config.json").write_text(json.dumps(config(**settings)))
        self.refused(bf16_dir, adapter, tmp_path / "m", message)

    @pytest.mark.parametrize(("tensors", "message"), [
        (factors("model.decoder.layers.0.attention.q_proj", 32, 32), "attention.q_proj is not a Linear layer of"),
        (factors(f"{DECODER}layers.2.self_attn.v_proj", 16, 32), "layers.2.self_attn.v_proj is not a Linear layer"),
        (factors(f"{DECODER}layers.9.self_attn.q_proj", 32, 32), "layers.9.self_attn.q_proj is not a Linear layer"),
        (factors(f"{DECODER}layers.0.experts", 32, 32), "layers.0.experts is not a Linear layer"),
        (factors("lm_head", VOCAB, 32), "lm_head is the tied embedding"),
        (factors(f"{DECODER}{Q}", 16, 32), f"makes a [16, 32] update, {DECODER}{Q}.weight is [32, 32]"),
        ({f"base_model.model.{DECODER}{Q}.lora_magnitude_vector": torch.ones(32)}, "is not a LoRA factor"),
        ({f"base_model.model.{DECODER}embed_tokens.lora_embedding_A": torch.ones(4, 96)}, "is not a LoRA factor"),
        ({f"base_model.model.{DECODER}{Q}.lora_A.weight": torch.ones(4, 32)}, "lora_B.weight, is missing"),
        ({n: t.int() for n, t in factors(f"{DECODER}{Q}", 32, 32).items()}, "is I32 [4, 32], expected a matrix of"),
        ({n: t * 1e30 for n, t in factors(f"{DECODER}{Q}", 32, 32).items()}, "merged weight is not finite"),
        ({}, "adapter_model.safetensors: holds no tensors"),
        ({**factors(f"{DECODER}{Q}", 32, 32), **factors(f"{ENCODER}{Q}", 32, 32, seed=1)},
         f"the LoRA of {ENCODER}{Q} differs from that of {DECODER}{Q}"),
    ])  # fmt: skip
    def test_tensors(self, bf16_dir: Path, tmp_path: Path, tensors: dict[str, torch.Tensor], message: str):
        self.refused(bf16_dir, write_adapter(tmp_path / "a", config(), tensors), tmp_path / "m", message)

    def test_files(self, bf16_dir: Path, adapter: Path, tmp_path: Path):
        target, file, pickled = tmp_path / "m", adapter / "adapter_model.safetensors", adapter / "adapter_model.bin"
        self.refused(bf16_dir, bf16_dir, target, "adapter_model.safetensors: file is missing")
        file.rename(pickled)
        self.refused(bf16_dir, adapter, target, "adapter_model.bin: pickled weights can run code")
        file.write_bytes(pickled.read_bytes()[:-8])
        self.refused(bf16_dir, adapter, target, "cut short within tensor")
        (adapter / "adapter_config.json").unlink()
        self.refused(bf16_dir, adapter, target, "adapter_config.json")

    def test_packed_base(self, packed_dir: Path, adapter: Path, tmp_path: Path):
        self.refused(packed_dir, adapter, tmp_path / "m", "merge into the BF16 checkpoint, then quantise")

    def refused(self, base: Path, adapter: Path, target: Path, message: str):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            merge_lora(base, adapter, target, both_sides=True)
        assert not target.exists() and not partial_path(target).exists()


class TestWriting:
    def test_resumes(self, bf16_dir: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """In shards, stopped after one of them: another adapter starts afresh, the same one goes on."""
        monkeypatch.setattr(rewrite, "SHARD_BYTES", 40_000)

        def stop(done: int, total: int) -> None:
            assert total > 3
            raise KeyboardInterrupt

        merge_lora(bf16_dir, adapter, tmp_path / "whole", both_sides=True)
        for changed in (False, True):
            target = tmp_path / f"m{changed}"
            with pytest.raises(KeyboardInterrupt):
                merge_lora(bf16_dir, adapter, target, both_sides=True, progress=stop)
            first = next(partial_path(target).glob("*.safetensors"))
            before = first.stat().st_mtime_ns
            if changed:
                write_adapter(adapter, config(lora_alpha=1), factors(f"{DECODER}{Q}", 32, 32))
            merge_lora(bf16_dir, adapter, target, both_sides=True)
            assert ((target / first.name).stat().st_mtime_ns == before) is not changed
        assert contents(tmp_path / "mFalse") == contents(tmp_path / "whole")
        assert open_checkpoint(tmp_path / "mFalse", verify=True).format == "bf16"
        with pytest.raises(UsageError, match="not empty"):
            merge_lora(bf16_dir, adapter, tmp_path / "whole", both_sides=True)

    def test_command(self, run: Run, bf16_dir: Path, adapter: Path, tmp_path: Path):
        command = ("merge-lora", bf16_dir, adapter, tmp_path / "m")
        done = run(*command)
        assert done.code == 1 and "on the decoder's side only" in done.err and not (tmp_path / "m").exists()
        done = run(*command, "--both-sides", "--json")
        assert done.code == 0 and done.json["adapter"] == "a"
        assert done.json["tensors"][0]["name"] == f"{DECODER}{Q}.weight"
        shutil.rmtree(tmp_path / "m")
        done = run(*command, "--both-sides")
        out = " ".join(done.out.split())
        assert done.code == 0 and "named on the decoder's side only" in out and "a merged into 1 weights of" in out
        done = run(*command, "--both-sides")
        assert done.code == 2 and "exists and is not empty" in done.err
