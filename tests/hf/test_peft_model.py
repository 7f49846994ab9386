"""`accelerate` on a PEFT model: the adapter is merged exactly once, or the model is left as it is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import DECODER, ENCODER, TARGETS, peft_model, reference_logits
from same_bits import assert_same_bits, from_pretrained
from tiny import dequantized
from transformers import DiffusionGemmaForBlockDiffusion

import redraft
from redraft.config import QuantSpec
from redraft.errors import UsageError

peft = pytest.importorskip("peft")

SPEC = QuantSpec(16, 8)


@pytest.fixture(scope="module")
def packed(tiny_hf: Any) -> Any:
    """The base model with packed experts."""
    model = copy.deepcopy(tiny_hf)
    redraft.accelerate(model, "off", SPEC)
    return model


def unmerged(model: Any, packed: Any) -> Any:
    """A copy of a PEFT model on the values that the packed experts stand for."""
    reference = copy.deepcopy(model)
    dequantized(reference.get_base_model(), packed)
    return reference


class TestMerged:
    @pytest.mark.parametrize("settings", [{}, {"use_rslora": True, "rank_pattern": {"q_proj": 2}}])
    def test_logits_equal_the_unmerged_adapter(self, settings: dict[str, Any], tiny_dir: Path, packed: Any):
        model = peft_model(tiny_dir, **settings)
        expected, before = reference_logits(unmerged(model, packed)), reference_logits(packed)
        report = redraft.accelerate(model, "bitexact", SPEC)
        assert report.replaced["adapter"].startswith("merged into 26 weights")
        base = model.get_base_model()
        assert isinstance(base, DiffusionGemmaForBlockDiffusion)
        assert not any("lora" in name for name, _ in base.named_modules())
        for used in (model, base):  # the wrapper goes on working
            torch.testing.assert_close(reference_logits(used), expected, rtol=0, atol=1e-4)
        assert (expected - before).abs().max() > 0.5, "an adapter that changes nothing proves nothing"

    def test_peft_itself_adds_twice_to_tied_weights(self, tiny_dir: Path):
        """Why its merge is not used; once this fails, it may be."""
        model = peft_model(tiny_dir)
        expected = reference_logits(model)
        assert (reference_logits(model.merge_and_unload()) - expected).abs().max() > 0.5

    def test_generates_saves_and_takes_another_tier(self, tiny_dir: Path, packed: Any, tmp_path: Path):
        model = peft_model(tiny_dir)
        redraft.accelerate(model, "off", SPEC)
        assert "adapter" not in redraft.accelerate(model, "bitexact").replaced
        base = model.get_base_model()
        base.save_pretrained(tmp_path)
        loaded = from_pretrained(tmp_path)
        ids, results = torch.tensor([[2, 8, 9]]), []
        for each in (model, base, loaded):
            torch.manual_seed(1)
            results.append(each.generate(ids, max_new_tokens=16, pad_token_id=0, eos_token_id=[1]).sequences)
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])

    def test_the_sum_is_fp32_rounded_once(self, tiny_dir: Path):
        model = peft_model(tiny_dir, target_modules=rf"{DECODER}self_conditioning.up_proj").to(torch.bfloat16)
        layer = model.get_base_model().model.decoder.self_conditioning.up_proj
        a, b = layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float()
        expected = (layer.base_layer.weight.float() + b @ a * 2.0).bfloat16()
        redraft.accelerate(model, "off", SPEC)
        assert torch.equal(model.get_base_model().model.decoder.self_conditioning.up_proj.weight, expected)

    def test_changed_scale_and_names(self, tiny_dir: Path, packed: Any):
        """The scale in memory counts, not the file's, and any name of an adapter will do."""
        model = peft_model(tiny_dir, name="mine")
        model.add_adapter("default", peft.LoraConfig(r=2, init_lora_weights=False, target_modules=TARGETS))
        assert model.active_adapters == ["mine"]
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.scaling["mine"] *= 0.5
        expected = reference_logits(unmerged(model, packed))
        redraft.accelerate(model, "off", SPEC)
        torch.testing.assert_close(reference_logits(model), expected, rtol=0, atol=1e-4)

    def test_adapter_on_a_packed_model(self, tiny_dir: Path, packed: Any):
        """What cannot be merged still runs: loaded after `accelerate`, or merged there if it can be."""
        source = peft_model(tiny_dir)
        expected = reference_logits(unmerged(source, packed))
        base = copy.deepcopy(packed)
        redraft.accelerate(base, "bitexact")
        model = peft.get_peft_model(base, source.peft_config["default"]).eval()
        model.load_state_dict({k: v for k, v in source.state_dict().items() if "lora_" in k}, strict=False)
        torch.testing.assert_close(reference_logits(model), expected, rtol=0, atol=1e-4)
        report = redraft.accelerate(model, "bitexact")
        assert report.layers_packed == 0 and "adapter" in report.replaced
        torch.testing.assert_close(reference_logits(model), expected, rtol=0, atol=1e-4)


class TestRefused:
    def refused(self, model: Any, message: str) -> None:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(UsageError, match=message):
            redraft.accelerate(model, "off", SPEC)
        assert_same_bits(model.state_dict(), before)

    @pytest.mark.parametrize("side", ["decoder", "encoder"])
    def test_one_side(self, side: str, tiny_dir: Path):
        named = f"23 weights are named on the {side}'s side only"
        self.refused(peft_model(tiny_dir, side), rf"{named}.*load it on the resu")

    def test_sides_that_differ(self, tiny_dir: Path):
        model = peft_model(tiny_dir)
        layer = model.get_base_model().model.encoder.language_model.layers[1].self_attn.q_proj
        layer.lora_B = copy.deepcopy(layer.lora_B)
        with torch.no_grad():
            layer.lora_B["default"].weight[3, 1] += 1
        name = "layers.1.self_attn.q_proj"
        self.refused(model, rf"cannot be merged: adapter_model.safetensors: the LoRA of {ENCODER}{name} differs")

    def test_other_adapters(self, tiny_dir: Path):
        self.refused(peft_model(tiny_dir, use_dora=True), "cannot be merged: adapter_config.json: use_dora is True")

    def test_merged_already(self, tiny_dir: Path):
        model = peft_model(tiny_dir)
        model.merge_adapter()
        self.refused(model, "the adapter is merged already")

    def test_several_active(self, tiny_dir: Path):
        model = peft_model(tiny_dir)
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=TARGETS))
        model.base_model.set_adapter(["default", "other"])
        self.refused(model, "adapters default, other are active")

    def test_loaded_into_the_model_itself(self, tiny_dir: Path):
        model = from_pretrained(tiny_dir)
        model = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=rf"{DECODER}.*q_proj"), model)
        self.refused(model, "an adapter was loaded into the model itself")

    def test_weights_that_are_not_tied(self, tiny_dir: Path):
        model = peft_model(tiny_dir)
        layer = model.get_base_model().model.encoder.language_model.layers[0].self_attn.q_proj
        layer.base_layer.weight = torch.nn.Parameter(layer.base_layer.weight + 1)
        self.refused(model, rf"{DECODER}layers.0.self_attn.q_proj.weight differs between encoder and decoder")
