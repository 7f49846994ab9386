"""What a checkpoint's tensors are called and how they are shaped.

A canonical name is the one transformers saves the tensor under; tied names fall together under `model.decoder.`.
"""

from __future__ import annotations

import re
from itertools import chain

from redraft.config import ModelConfig

Shape = tuple[int, ...]

DECODER = "model.decoder."
ENCODER = "model.encoder.language_model."
VISION = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")

PACKED_NAMES = ("gu_q", "gu_s", "gu_z", "dn_q", "dn_s", "dn_z")  # the fields of PackedExperts, in `dg-w4a16-v1`
FLOATS = ("BF16", "F16", "F32")  # safetensors dtypes in which plain weights are read
_PACKED = re.compile(rf"(?:.*\.)?layers\.(\d+)\.experts\.({'|'.join(PACKED_NAMES)})")
_SCALAR = re.compile(r"layers\.\d+\.layer_scalar")


def canonical_name(name: str) -> str:
    """The one name under which Redraft knows a stored tensor.

    Tied names fall together under `model.decoder.`: the encoder's copies, the head (`lm_head.weight`, the embedding
    again), names without the leading `model.`, and packed experts under any prefix. Layer scalars of the encoder are
    not tied and keep theirs. Unknown names come back unchanged.
    """
    if packed := _PACKED.fullmatch(name):
        return f"{DECODER}layers.{int(packed[1])}.experts.{packed[2]}"
    if name in ("lm_head.weight", "model.lm_head.weight"):
        return f"{DECODER}embed_tokens.weight"
    full = full_name(name)
    rest = full.removeprefix(ENCODER)
    return DECODER + rest if rest != full and not _SCALAR.fullmatch(rest) else full


def full_name(name: str) -> str:
    """A name with the leading `model.` that some files and adapters leave out."""
    return f"model.{name}" if name.startswith(("decoder.", "encoder.")) else name


def part_of(name: str) -> str:
    """The part of the network a canonical name belongs to, as reports call it."""
    for part, pattern in _PARTS:
        if pattern.search(name):
            return part
    return "other"


_PARTS = [
    (part, re.compile(pattern))
    for part, pattern in (
        ("vision", r"^model\.encoder\.(vision_tower|embed_vision)\."),
        ("embedding", r"^model\.decoder\.embed_tokens\."),
        ("self-conditioning", r"^model\.decoder\.self_conditioning\."),
        ("experts", r"^model\.decoder\.layers\.\d+\.experts\."),
        ("router", r"^model\.decoder\.layers\.\d+\.router\."),
        ("norms", r"^model\.decoder\.(layers\.\d+\.(self_attn\.)?\w*norm\w*|norm)\.|\.layer_scalar$"),
        ("attention", r"^model\.decoder\.layers\.\d+\.self_attn\."),
        ("dense MLP", r"^model\.decoder\.layers\.\d+\.mlp\."),
    )
]
PARTS = ("embedding", "attention", "dense MLP", "experts", "router", "norms", "self-conditioning", "vision", "other")


def layer_tensors(config: ModelConfig, index: int) -> dict[str, tuple[str, Shape]]:
    """Field of LayerWeights -> (canonical name, shape), without the experts."""
    layer, h, wide = config.layers[index], config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    table: dict[str, tuple[str, Shape]] = {
        **{name: (f"{name}.weight", (h,)) for name in _LAYER_NORMS},
        "q_proj": ("self_attn.q_proj.weight", (q, h)),
        "k_proj": ("self_attn.k_proj.weight", (kv, h)),
        "v_proj": ("self_attn.v_proj.weight", (kv, h)),
        "o_proj": ("self_attn.o_proj.weight", (h, q)),
        "q_norm": ("self_attn.q_norm.weight", (layer.head_dim,)),
        "k_norm": ("self_attn.k_norm.weight", (layer.head_dim,)),
        "gate_proj": ("mlp.gate_proj.weight", (wide, h)),
        "up_proj": ("mlp.up_proj.weight", (wide, h)),
        "down_proj": ("mlp.down_proj.weight", (h, wide)),
        "router_proj": ("router.proj.weight", (config.num_experts, h)),
        "router_scale": ("router.scale", (h,)),
        "per_expert_scale": ("router.per_expert_scale", (config.num_experts,)),
        "decoder_scalar": ("layer_scalar", (1,)),
    }
    if layer.kind == "full":
        del table["v_proj"]  # V is made from k_proj's output
    named = {key: (f"{DECODER}layers.{index}.{name}", shape) for key, (name, shape) in table.items()}
    return {**named, "encoder_scalar": (f"{ENCODER}layers.{index}.layer_scalar", (1,))}


_LAYER_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2",
)  # fmt: skip


def shared_tensors(config: ModelConfig) -> dict[str, tuple[str, Shape]]:
    """Field of Weights or SelfConditioningWeights -> (canonical name, shape)."""
    h, wide = config.hidden_size, config.intermediate_size
    inner = f"{DECODER}self_conditioning"
    return {
        "embed": (f"{DECODER}embed_tokens.weight", (config.vocab_size, h)),
        "norm": (f"{DECODER}norm.weight", (h,)),
        "pre_norm": (f"{inner}.pre_norm.weight", (h,)),
        "gate_proj": (f"{inner}.gate_proj.weight", (wide, h)),
        "up_proj": (f"{inner}.up_proj.weight", (wide, h)),
        "down_proj": (f"{inner}.down_proj.weight", (h, wide)),
    }


def expert_names(layer: int) -> tuple[str, str]:
    """Canonical names of one layer's unpacked experts: gate_up [E, 2I, H] and down [E, H, I]."""
    prefix = f"{DECODER}layers.{layer}.experts"
    return f"{prefix}.gate_up_proj", f"{prefix}.down_proj"


def packed_layer(name: str) -> int | None:
    """The layer a packed expert tensor belongs to, under whatever prefix; None for other tensors."""
    found = _PACKED.fullmatch(name)
    return int(found[1]) if found else None


def packed_name(layer: int, name: str) -> str:
    """Canonical name of one of a layer's six packed tensors."""
    return f"{DECODER}layers.{layer}.experts.{name}"


def text_tensors(config: ModelConfig) -> dict[str, tuple[tuple[str, ...], Shape]]:
    """Canonical name -> (dtypes accepted, shape) of the whole text network but the experts."""
    tables = chain([shared_tensors(config)], (layer_tensors(config, i) for i in range(config.num_layers)))
    return {name: (FLOATS, shape) for table in tables for name, shape in table.values()}
