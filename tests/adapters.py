"""PEFT adapters on the tiny model, for the tests that merge them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CANVAS, VOCAB
from transformers import DiffusionGemmaForBlockDiffusion

DECODER, ENCODER = "model.decoder.", "model.encoder.language_model."
PROMPT = 20
# Which modules of a layer are adapted, and those only the decoder has.
LAYER = r"layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj|router\.proj)"
TARGETS = rf"model\.(decoder|encoder\.language_model)\.{LAYER}|model\.decoder\.self_conditioning\.\w+_proj"


def peft_model(path: Path, sides: str = "both", name: str = "default", **settings: Any):
    """transformers' model of a checkpoint under a random adapter; sides "both" shares factors."""
    peft = pytest.importorskip("peft")
    targets = {"both": TARGETS, "decoder": rf"model\.decoder\.{LAYER}", "encoder": rf"model\.encoder\.lang.*\.{LAYER}"}
    base = DiffusionGemmaForBlockDiffusion.from_pretrained(path).float().eval()
    torch.manual_seed(5)
    given = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "target_modules": targets[sides], **settings}
    model = peft.get_peft_model(base, peft.LoraConfig(**given), adapter_name=name).eval()
    if sides == "both":
        share_factors(model)
    return model


def share_factors(model: Any) -> None:
    """As docs/export.md recommends before training."""
    modules = dict(model.get_base_model().named_modules())
    for name, module in modules.items():
        if hasattr(module, "lora_A") and name.startswith(ENCODER):
            twin = modules[name.replace(ENCODER, DECODER)]
            module.lora_A, module.lora_B = twin.lora_A, twin.lora_B


@torch.no_grad()
def reference_logits(model) -> torch.Tensor:
    prompt, canvas, conditioning = inputs()
    return model(input_ids=prompt, decoder_input_ids=canvas, self_conditioning_logits=conditioning).logits


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    prompt, canvas = (torch.randint(6, VOCAB, (2, length), generator=generator) for length in (PROMPT, CANVAS))
    return prompt, canvas, torch.randn(2, CANVAS, VOCAB, generator=generator)
