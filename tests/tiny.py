"""Tiny random DiffusionGemma models of transformers' own class, for every test that needs a network."""

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextConfig,
    Gemma4VisionConfig,
    PreTrainedTokenizerFast,
)  # fmt: skip

from redraft.kernels.packing import dequantize
from redraft.store.names import canonical_name

VOCAB, CANVAS, WINDOW = 96, 8, 10

TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": WINDOW,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1,
    "head_dim": 8, "global_head_dim": 16, "max_position_embeddings": 256,
    "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 16, "position_embedding_size": 8,
}  # fmt: skip

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ m['role'] }}\n{{ m['content'] }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, fewer than VOCAB, with Gemma's turn tokens."""
    specials = ["<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<unk>"]
    characters = [*"\n .,:;!?+-*/='", *string.ascii_letters, *string.digits]
    vocab = {token: i for i, token in enumerate([*specials, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>",
        additional_special_tokens=["<|turn>", "<turn|>"], chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def tiny_config(canvas_length: int = CANVAS, **text: object) -> DiffusionGemmaConfig:
    text_config = DiffusionGemmaTextConfig(**{**TEXT, **text})
    vision_config = Gemma4VisionConfig(**VISION)
    return DiffusionGemmaConfig(text_config=text_config, vision_config=vision_config, canvas_length=canvas_length)


def tiny_model(seed: int = 0, **overrides: object) -> DiffusionGemmaForBlockDiffusion:
    """An fp32 model whose every parameter and buffer matters: no norm weight or layer scalar is left at one."""
    torch.manual_seed(seed)
    model = DiffusionGemmaForBlockDiffusion._from_config(tiny_config(**overrides)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
            else:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if "layer_scalar" in name:
                buffer.fill_(0.8 + 0.3 * float(torch.rand(())))
    return model


def contents(path: Path) -> dict[str, bytes]:
    """What the files of a directory hold, by name."""
    return {file.name: file.read_bytes() for file in path.iterdir()}


def stored(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a directory by canonical name."""
    files = sorted(path.glob("*.safetensors"))
    return {canonical_name(name): tensor for file in files for name, tensor in load_file(file).items()}


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Apply `change` to the tensors of a file; a new dict replaces them, None means it changed them in place."""
    tensors = load_file(file)
    result = change(tensors)
    save_file(result if isinstance(result, dict) else tensors, file, metadata={"format": "pt"})


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def flip(file: Path) -> None:
    """Change the last bit."""
    raw = file.read_bytes()
    file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))


def published_layout(packed: Path) -> None:
    """Leave of a directory by `redraft quantize` what `dg-w4a16-v1` asks for, which is all that other writers write."""
    for name in ("manifest.json", "quant_report.json", "model.safetensors.index.json", "needs_redraft.safetensors"):
        (packed / name).unlink()
    (packed / "model-00001-of-00001.safetensors").rename(packed / "model.safetensors")
    (packed / "w4_meta.json").write_text('{"format": "dg-w4a16-v1"}')
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (packed / "config.json").write_text(json.dumps(config))


def dequantized(model: Any, packed: Any) -> Any:
    """`model` with its experts replaced by the values that `packed` holds in 4 bits."""
    with torch.no_grad():
        for dense, layer in zip(model.model.decoder.layers, packed.model.decoder.layers, strict=True):
            w = layer.experts.packed()
            dense.experts.gate_up_proj.copy_(dequantize(w.gu_q, w.gu_s, w.gu_z))
            dense.experts.down_proj.copy_(dequantize(w.dn_q, w.dn_s, w.dn_z))
    return model
